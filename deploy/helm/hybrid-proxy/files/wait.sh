#!/bin/sh
# Waits until each Ready node with a label has a ready pod of a DaemonSet in kube-system. Nodes are read anew each second: one
# that is removed, or whose kubelet is lost, holds up nothing. It names those that lack such a pod whenever they change, and at
# the end those that are not Ready.
#
#   sh wait.sh POD-LABEL NODE-LABEL [SECONDS: 600]
#   sh wait.sh app.kubernetes.io/name=hybrid-proxy hybrid-proxy.io/wave=1
#
# Exit code 1: nodes lack one after so long, no Ready node has the label, or the API cannot be read.
set -eu
[ $# -ge 2 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
ready='{.status.conditions[?(@.type=="Ready")].status}'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
: >told
end=$(($(date +%s) + ${3:-600}))
while :; do
    kubectl get nodes -l "$2,kubernetes.io/os=linux" -o "jsonpath={range .items[*]}{.metadata.name} $ready{'\n'}{end}" >nodes.txt
    kubectl -n kube-system get pods -l "$1" -o "jsonpath={range .items[*]}{.spec.nodeName} $ready {.metadata.deletionTimestamp}{'\n'}{end}" >pods.txt
    grep -q ' True$' nodes.txt || { echo "wait: no Ready node of Linux has the label $2" >&2; exit 1; }
    awk '$2 == "True" && NF == 2 { if (FILENAME == "pods.txt") has[$1]; else if (!($1 in has)) print $1 }' pods.txt nodes.txt >missing
    [ -s missing ] || { echo "wait: done$(awk '$2 != "True" { printf ", but for %s, which is not Ready", $1 }' nodes.txt)" >&2; exit 0; }
    cmp -s missing told || echo "wait: no ready pod of $1 on: $(paste -sd ' ' missing)" >&2
    mv missing told
    [ "$(date +%s)" -lt "$end" ] || { echo "wait: given up: $1" >&2; exit 1; }
    sleep 1
done
