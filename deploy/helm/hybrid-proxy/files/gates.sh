#!/bin/sh
# The gates of docs/migration.md without Prometheus: two looks at the metrics of the agents on the nodes with a label, each in
# the agent's own pod. It prints PASS or FAIL, the gates that failed, and the p99 of first packets for each node.
#
#   sh gates.sh LABEL [SECONDS between the looks: 300] [SECONDS that the p99 may have]
#   sh gates.sh hybrid-proxy.io/wave=1 300 0.0015
#   sh gates.sh hybrid-proxy.io/wave                  all waves
#
# Exit code 1: a gate failed. METRICS is another address than kube-proxy's default. With AGENTS=systemd the agents run outside
# of pods, and are asked by ssh at the node's name, as root or as LOGIN.
set -eu
[ $# -ge 1 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
label=$1 seconds=${2:-300} longest=${3:-}
: "${METRICS:=http://127.0.0.1:10249/metrics}" "${LOGIN:=root}"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export METRICS LOGIN folder

ready='{.status.conditions[?(@.type=="Ready")].status}'
kubectl get nodes -l "$label,kubernetes.io/os=linux,hybrid-proxy.io/kube-proxy!=yes" \
    -o "jsonpath={range .items[*]}{.metadata.name} $ready{'\n'}{end}" >"$folder/all"
awk '$2 == "True" { print $1 }' "$folder/all" >"$folder/nodes"
awk '$2 != "True" { print "gates: " $1 " is left out, because it is not Ready" }' "$folder/all" >&2
[ -s "$folder/nodes" ] || { echo "gates: no Ready node has an agent and the label $label" >&2; exit 1; }

cat >"$folder/ask" <<'ASK'
import sys, urllib.request
sys.stdout.buffer.write(urllib.request.urlopen(sys.argv[1], timeout=20).read())
ASK
# shellcheck disable=SC2016 # the inner shells'
# look N: FOLDER/NODE.N has what the agent of each node exports, or why it does not answer.
look() {
    if [ "${AGENTS:-}" = systemd ]; then
        awk '{ print $1, "'"$folder"'/" $1 ".'"$1"'" }' "$folder/nodes" |
            xargs -r -n 2 -P 10 sh -c 'ssh -o BatchMode=yes "$LOGIN@$0" python3 - "$METRICS" <"$folder/ask" >"$1" 2>&1 || :'
        return
    fi
    while read -r node; do echo "no pod of an agent" >"$folder/$node.$1"; done <"$folder/nodes"
    kubectl -n kube-system get pods -l app.kubernetes.io/name=hybrid-proxy \
        -o 'jsonpath={range .items[*]}{.spec.nodeName} {.metadata.name}{"\n"}{end}' |
        awk 'NR == FNR { asked[$1]; next } $1 in asked { print $2, "'"$folder"'/" $1 ".'"$1"'" }' "$folder/nodes" - |
        xargs -r -n 2 -P 10 sh -c 'kubectl -n kube-system exec "$0" -c hybrid-proxy -- python3 -c "$(cat "$folder/ask")" "$METRICS" >"$1" 2>&1 || :'
}
look 1
echo "gates: $(wc -l <"$folder/nodes") nodes; the second look follows in $seconds s" >&2
sleep "$seconds"
look 2

failed=0
while read -r node; do
    awk -v node="$node" -v seconds="$seconds" -v longest="$longest" '
        function fail(gate) { if (!(gate in told)) { told[gate]; failures = failures (failures ? "; " : "") gate } }
        FNR == 1 { look++ }
        { name = $0; sub(/ [^ ]*$/, "", name); value = $NF + 0 }
        !/^command terminated/ { last = $0 }
        look == 1 { before[name] = value; next }
        { more = value < before[name] ? value : value - before[name] }  # a new agent counts from 0
        name == "hybrid_proxy_synced" { answers = 1; if (value != 1) fail("they serve") }
        value == 1 && name ~ /^hybrid_proxy_mode[{].*degraded="true"/ { fail("as asked") }
        value == 1 && name ~ /^hybrid_proxy_configuration_refused/ { fail("configured") }
        value == 0 && name ~ /^hybrid_proxy_source_up/ { fail("the API is read") }
        value == 1 && name ~ /^hybrid_proxy_unprogrammed/ { fail("nothing is left out") }
        more > 0 && name ~ /^hybrid_proxy_sync_failures_total/ { fail("syncs") }
        more > seconds && name ~ /^hybrid_proxy_events_total[{]reason="drop_(flow_full|no_port|no_route|no_address)"/ { fail("drops") }
        value > 0 && name ~ /^hybrid_proxy_health_check_node_ports[{]state="failed"/ { fail("health ports") }
        name ~ /^kubeproxy_network_programming_duration_seconds_bucket.*le="30(\.0)?"/ { quick += more }
        name ~ /^kubeproxy_network_programming_duration_seconds_bucket.*le="[+]Inf"/ { changes += more }
        name ~ /^hybrid_proxy_service_first_packet_seconds_bucket/ {
            match(name, /le="[^"]*/)
            bound = substr(name, RSTART + 4, RLENGTH - 4)
            if (!(bound in first)) bounds[++count] = bound
            first[bound] += more
        }
        END {
            if (!answers) fail("they serve: " last)
            if (changes - quick > changes / 100) fail("changes, p99")
            for (n = 1; n < count && first[bounds[n]] < 0.99 * first["+Inf"]; n++);
            p99 = first["+Inf"] ? bounds[n] : "none"
            if (longest != "" && p99 != "none" && (p99 == "+Inf" || p99 + 0 > longest + 0)) fail("first packets, p99")
            print (failures ? "FAIL " : "PASS ") node (failures ? ": " failures : "") ", first packets p99 " p99
            exit failures != ""
        }' "$folder/$node.1" "$folder/$node.2" || failed=1
done <"$folder/nodes"
exit "$failed"
