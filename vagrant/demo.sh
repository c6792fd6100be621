#!/bin/sh
# On a machine of the lab: `demo migrate` goes from kube-proxy to hybrid-proxy on all nodes, under load, and `demo back` goes
# back. In between, `demo` shows a service balanced in each mode; `demo nftables ebpf` in these.
# `demo compare` measures the modes beside each other, in namespaces of this machine; more flags are those of the command.
set -eu
: "${REQUESTS:=60}" "${NODES:=control worker1 worker2}" "${ROOT_COMMAND:=sudo}" "${CONFIG:=/etc/hybrid-proxy/config.conf}"
: "${REPORT:=/var/tmp/compare/report.html}"

# tally: answers, one a line, to "pod-a 21, pod-b 19"; an empty line is a request without an answer.
tally() {
    awk '{ count[$0 == "" ? "no answer" : $0]++ }
         END { for (name in count) printf "%s%s %d", (n++ ? ", " : ""), name, count[name]; print "" }'
}

# ask WHERE URL: one answer a line, each over a connection of its own.
from_pod() {
    kubectl exec client -- sh -c "for i in \$(seq $REQUESTS); do curl -s -m 3 $1/hostname; echo; done"
}
from_node() {
    for _ in $(seq "$REQUESTS"); do
        curl -s -m 3 "$1/hostname" || true
        echo
    done
}

# on NODE COMMAND: here, or on another machine of the lab, whose shell gets one line from ssh: each word is quoted for it.
on() {
    node=$1
    shift
    if [ "$node" = "$(hostname)" ]; then
        $ROOT_COMMAND "$@"
    else
        line=
        for word; do line="$line '$(printf %s "$word" | sed "s/'/'\\\\''/g")'"; done
        ssh -o BatchMode=yes -o StrictHostKeyChecking=accept-new "$node" "sudo$line"
    fi
}

# set_mode NODE MODE: the agent takes over from the former mode without losing a connection that begins now.
set_mode() {
    on "$1" sed -i "s/^mode: .*/mode: $2/" "$CONFIG"
    on "$1" systemctl restart hybrid-proxy
    wait_for_agent "$1"
}

wait_for_agent() {
    for _ in $(seq 60); do
        on "$1" hybrid-proxy status -o json 2>/dev/null | grep -q '"synced": *true' && return
        sleep 1
    done
    echo "demo: the agent of $1 is not ready after a minute: journalctl -u hybrid-proxy" >&2
    return 1
}

serving_mode() {
    on "$(hostname)" hybrid-proxy status -o json | sed -n 's/.*"effective": *"\([a-z]*\)".*/\1/p' | head -n 1
}

# under_load COMMAND ...: new connections from a pod, one after the other, while the command runs, also if it fails; who
# answered.
under_load() {
    answers=$(mktemp)
    kubectl exec client -- sh -c ": >/tmp/load; while [ -e /tmp/load ]; do curl -s -m 3 http://$address/hostname; echo; sleep 0.1; done" >"$answers" &
    trap 'kubectl exec client -- rm -f /tmp/load' EXIT
    "$@"
    trap - EXIT
    kubectl exec client -- rm /tmp/load
    wait $!
    echo "  pod -> $address:80, meanwhile    $(tally <"$answers")"
    rm "$answers"
}

# The steps of docs/migration.md. A node with the label keeps its kube-proxy; none has it.
OFF='{"spec":{"template":{"spec":{"nodeSelector":{"hybrid-proxy.io/kube-proxy":"yes"}}}}}'
ON='[{"op":"remove","path":"/spec/template/spec/nodeSelector/hybrid-proxy.io~1kube-proxy"}]'
migrate() {
    echo "kube-proxy ends; its rules stay, and serve"
    kubectl -n kube-system patch daemonset kube-proxy --type merge -p "$OFF"
    kubectl -n kube-system wait --for delete pod --selector k8s-app=kube-proxy --timeout 120s
    for node in $NODES; do
        echo "hybrid-proxy starts on $node, and takes over"
        on "$node" systemctl enable -q --now hybrid-proxy
        wait_for_agent "$node"
        on "$node" hybrid-proxy takeover
    done
}
back() {
    for node in $NODES; do on "$node" systemctl disable -q --now hybrid-proxy; done
    echo "kube-proxy starts beside what hybrid-proxy left, which serves until then"
    kubectl -n kube-system patch daemonset kube-proxy --type json -p "$ON"
    kubectl -n kube-system rollout status daemonset/kube-proxy --timeout 180s
    for node in $NODES; do on "$node" hybrid-proxy cleanup; done
}

# load_generators: installed when one is missing. Of nginx the program is wanted, not a server at port 80.
load_generators() {
    for program in wrk iperf3 nginx; do
        (PATH="$PATH:/usr/sbin"; command -v "$program" >/dev/null) || missing="${missing:-} $program"
    done
    [ -n "${missing:-}" ] || return 0
    $ROOT_COMMAND systemctl mask -q nginx
    $ROOT_COMMAND apt-get update -q
    # shellcheck disable=SC2086 # a list of packages
    $ROOT_COMMAND apt-get install -q -y --no-install-recommends $missing
}

# in_modes MODE ...: who answers in each.
in_modes() {
    for mode; do
        for node in $NODES; do set_mode "$node" "$mode"; done
        echo "mode $mode ($(serving_mode) serves)"
        echo "  pod  -> $address:80          $(from_pod "http://$address" | tally)"
        echo "  node -> $address:80          $(from_node "http://$address" | tally)"
        echo "  node -> $(hostname):30080    $(from_node "http://$(hostname):30080" | tally)"
    done
}

main() {
    if [ "${1:-}" = compare ]; then
        shift
        load_generators
        exec $ROOT_COMMAND hybrid-proxy compare --report "$REPORT" "$@"
    fi
    kubectl rollout status deployment/web --timeout 180s
    kubectl wait pod/client --for condition=Ready --timeout 180s
    address=$(kubectl get service web -o 'jsonpath={.spec.clusterIP}')
    case "${1:-}" in migrate | back)
        under_load "$1"
        return
        ;;
    esac
    on "$(hostname)" systemctl is-active -q hybrid-proxy || { echo "demo: kube-proxy serves here: demo migrate" >&2; return 1; }
    [ $# -gt 0 ] || set -- ebpf nftables iptables ipvs userspace
    in_modes "$@"
}

# Sourced by a test, it only defines.
[ "${DEMO_SOURCED:-}" = yes ] || main "$@"
