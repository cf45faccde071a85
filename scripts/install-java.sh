#!/bin/sh
# Install Java 17 or newer for Spark if it is missing, with the system's package manager if that is allowed.
set -eu
what=java
otherwise='or set JAVA_HOME to the folder of one'
. "$(dirname "$0")/packages.sh"

# Spark starts the Java of JAVA_HOME, or else the first one in PATH. macOS without Java has a java that only prints so.
java=java
[ -z "${JAVA_HOME:-}" ] || java=$JAVA_HOME/bin/java
release() { "$java" -XshowSettings:properties -version 2>&1 | sed -n 's/^ *java.specification.version = \([0-9]*\).*/\1/p'; }

found=$(release || true)
[ "${found:-0}" -lt 17 ] || exit 0
if [ -n "${JAVA_HOME:-}" ]; then
    die "JAVA_HOME is $JAVA_HOME, where Spark finds ${found:+Java }${found:-no Java}: it needs 17 or newer"
fi
missing="Spark needs Java 17 or newer, and ${found:+this one is }${found:-none is here}"

need_packages "$missing" openjdk@17 ' and put it in the PATH'
update_packages
# Each release of Debian has one or two of these.
for package in openjdk-17-jre-headless openjdk-21-jre-headless openjdk-25-jre-headless; do
    [ -n "$(apt-cache -q madison "$package" 2>/dev/null)" ] || continue
    install_packages "$package"
    found=$(release || true)
    [ "${found:-0}" -ge 17 ] || die "$package is installed, but java is still ${found:-missing}: put it first in the PATH, $otherwise"
    exit 0
done
die "$missing, and apt-get knows none: install it, $otherwise"
