#!/bin/sh
# Steps of docs/migration.md (With services of systemd) on the Ready nodes of Linux with a label: ten at a time, by ssh
# at the node's name, as root or as LOGIN, who may use sudo without a password. Each line begins with the node that says it.
#
#   sh nodes.sh start hybrid-proxy.io/wave=1       starts the service, and waits until its agent serves
#   sh nodes.sh takeover hybrid-proxy.io/wave=1    removes what kube-proxy left
#   sh nodes.sh stop hybrid-proxy.io/wave=1        ends the service; what it programmed serves
#   sh nodes.sh cleanup hybrid-proxy.io/wave=1     waits for kube-proxy's first sync, and removes what the agent left
#
# Exit code 1: it failed on a node, or no Ready node has the label. LONGEST is how many seconds it waits for a proxy, DRAIN
# how many for open flows (default: until the last one is over), METRICS another address of kube-proxy's metrics.
set -eu
: "${LOGIN:=root}" "${LONGEST:=600}" "${DRAIN:=}" "${METRICS:=http://127.0.0.1:10249/metrics}"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# A node's shell reads this, with `step` and these settings in front.
cat >"$folder/steps" <<'STEPS'
# await COMMAND ...: until it succeeds.
await() {
    for _ in $(seq "$LONGEST"); do
        "$@" >/dev/null 2>&1 && return
        sleep 1
    done
    echo "given up after $LONGEST s"
    return 1
}
start() {
    systemctl enable -q --now hybrid-proxy
    await hybrid-proxy status --exit-code || { hybrid-proxy status; return 1; }
    hybrid-proxy status | head -n 1
}
# It is refused while a kube-proxy is about to end.
takeover() {
    for _ in $(seq 0 3 "$LONGEST"); do
        hybrid-proxy takeover && return
        sleep 3
    done
    return 1
}
stop() { systemctl disable -q --now hybrid-proxy; }
# Each address family that asked kube-proxy for a sync has had one. An agent that is about to end has the same port.
serves() {
    python3 -c 'import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())' "$METRICS" | awk '
        /^hybrid_proxy_/ { ours = 1 }
        $NF + 0 && /^kubeproxy_sync_proxy_rules_last_timestamp_seconds/ { synced++ }
        $NF + 0 && /^kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds/ { queued++ }
        END { exit ours || !synced || synced < queued }'
}
cleanup() {
    await serves || { echo "kube-proxy has not synced: $METRICS"; return 1; }
    hybrid-proxy cleanup --drain $DRAIN
}
set -e
"$step"
STEPS
# What is said again and again is printed once.
# shellcheck disable=SC2016 # awk's
echo '$0 != last { print node ": " $0; fflush() } { last = $0 }' >"$folder/lines"

case "${1:-}" in start | takeover | stop | cleanup) ;; *) set -- ;; esac
[ $# -eq 2 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
{ printf 'step=%s LONGEST=%s DRAIN=%s METRICS=%s\n' "$1" "$LONGEST" "$DRAIN" "$METRICS"; cat "$folder/steps"; } >"$folder/script"
ready='{.status.conditions[?(@.type=="Ready")].status}'
kubectl get nodes -l "$2,kubernetes.io/os=linux" -o "jsonpath={range .items[*]}{.metadata.name} $ready{'\n'}{end}" >"$folder/nodes"
awk '$2 == "True" { print $1 }' "$folder/nodes" >"$folder/reached"
awk '$2 != "True" { print $1 ": left out, because it is not Ready" }' "$folder/nodes" >&2
[ -s "$folder/reached" ] || { echo "nodes: no Ready node of Linux has the label $2" >&2; exit 1; }
[ "$LOGIN" = root ] && shell="sh" || shell='sudo -n sh'
export LOGIN shell folder
# shellcheck disable=SC2016 # the inner shell's
xargs -n 1 -P 10 sh -c '{ ssh -o BatchMode=yes "$LOGIN@$1" "$shell" <"$folder/script" 2>&1 || echo "FAILED ($?)"; } | awk -v node="$1" -f "$folder/lines"' \
    nodes <"$folder/reached" | tee "$folder/said"
! grep -q ': FAILED ([0-9]*)$' "$folder/said"
