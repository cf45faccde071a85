#!/bin/sh
# Install Go, its RabbitMQ client and strace, which the tests of examples/wire/go use, if they are missing, with the system's
# package manager if that is allowed.
set -eu
what=go
otherwise='or put a go of release 1.19 or newer and strace in the PATH, and github.com/rabbitmq/amqp091-go in /usr/share/gocode'
. "$(dirname "$0")/packages.sh"

# The same location as in docs/wire-contract.md.
if command -v go >/dev/null && command -v strace >/dev/null && [ -d /usr/share/gocode/src/github.com/rabbitmq/amqp091-go ]; then exit 0; fi
need_packages 'the tests build a Go program and trace it, and Go, its RabbitMQ client or strace is missing' go ''
update_packages
set -- golang-github-rabbitmq-amqp091-go-dev strace
command -v go >/dev/null || set -- golang-go "$@"
install_packages "$@"
