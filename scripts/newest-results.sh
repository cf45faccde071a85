#!/bin/sh
# Print the newest file of results for each release of RabbitMQ, the newest release first.
set -eu
cd "$(dirname "$0")/.."
# benchmarks/results/<year>-<month>-<day>-<release>.json
for file in benchmarks/results/*.json; do
    [ -e "$file" ] || continue
    name=${file##*/}
    name=${name%.json}
    day=$(echo "$name" | cut -d - -f 1-3)
    echo "${name#"$day"-} $day $file"
done | sort -k1,1Vr -k2,2r | awk '$1 != before { print $3; before = $1 }'
