#!/bin/sh
# Install a Java compiler, the RabbitMQ client and Gson for the tests of examples/wire/java if they are missing, with the
# system's package manager if that is allowed.
set -eu
what=java-client
otherwise='or put amqp-client.jar, gson.jar, slf4j-api.jar and slf4j-nop.jar in /usr/share/java'
. "$(dirname "$0")/packages.sh"

# The same jars as in docs/wire-contract.md.
jars() {
    for jar in amqp-client gson slf4j-api slf4j-nop; do
        [ -e "/usr/share/java/$jar.jar" ] || return 1
    done
}

if command -v javac >/dev/null && jars; then exit 0; fi
need_packages 'the tests compile a Java program, and its compiler or its libraries are missing' openjdk@17 ''
update_packages
set -- librabbitmq-client-java libgoogle-gson-java libslf4j-java
command -v javac >/dev/null || set -- "$@" default-jdk-headless
install_packages "$@"
