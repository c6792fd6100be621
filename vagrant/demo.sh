#!/bin/sh
# On a machine of the lab: `demo check` says whether the Service answers, from everywhere, and who serves.
# `demo waves` types the blocks of docs/migration.md, with pods: node after node, one rolled back in between, under load, and
# `demo unwind` goes back; `demo waves services` and `demo unwind services` type those for services of systemd. `demo migrate`
# and `demo back` move all nodes to such services at once; in between, `demo` shows a service balanced in each mode; `demo
# nftables ebpf` in these.
# `demo compare` measures the modes beside each other, in namespaces of this machine; more flags are those of the command.
set -eu
: "${SOURCE:=/hybrid-proxy}" "${WAVES:=1 2 5-1}" "${GATES:=30}"
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

# set_mode NODE MODE: the agent takes over from the former mode without losing a connection that begins now. kube-proxy's own
# document, which `demo waves services` installs, has no word for some modes.
set_mode() {
    on "$1" grep -q '^kind: HybridProxyConfiguration' "$CONFIG" ||
        printf '\n---\napiVersion: hybrid-proxy.io/v1alpha1\nkind: HybridProxyConfiguration\nmode: auto\n' |
        on "$1" tee -a "$CONFIG" >/dev/null
    on "$1" sed -i "/^kind: HybridProxyConfiguration/,\$ s/^mode: .*/mode: $2/" "$CONFIG"
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

# The shortest way, without waves and gates: a node with the label keeps its kube-proxy; none has it.
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

empty= # whether waves may be without nodes
# block NAME [MORE [FIRST]]: the commands of a block of the page, typed one after the other; MORE is an argument of each, FIRST
# the number of the first one.
block() {
    awk -v first="\`\`\`sh cluster $1" '$0 == first { on = 1; next } /^```/ { on = 0 } on' "$SOURCE/docs/migration.md" |
        sed ":join; /\\\\\$/ { N; s/\\\\\n *//; b join; }; s/\$/${2:+ $2}/" | tail -n "+${3:-1}" >typed
    [ -s typed ] || { echo "demo: docs/migration.md has no block $1" >&2; return 1; }
    while IFS= read -r line <&3; do
        echo "\$ $line"
        sh -c "$line" 3<&- || [ -n "$empty" ] || return 1
    done 3<typed
}

# in_folder COMMAND ...: in a folder with `deploy`, where the blocks leave their lists, beside the overlays of deploy/README.md,
# for the image that each node has.
in_folder() {
    folder=$(mktemp -d)
    mkdir "$folder/hybrid-proxy"
    ln -s "$SOURCE/deploy" "$folder/hybrid-proxy/deploy"
    awk '/^```/ { on = $0 == "```sh site"; next } on' "$SOURCE/deploy/README.md" | sed 's#registry\.example/##' >"$folder/site.sh"
    (cd "$folder/hybrid-proxy" && sh -e ../site.sh && "$@")
    rm -r "$folder"
}

# Here wave 1 and 2 are a worker each, and 5-1 is the control plane; 3 has no nodes, which the page allows.
waves() {
    kind=${1:+$1 }
    [ -n "$kind" ] || block census
    block labels
    block "labels list"
    empty=waves
    block "labels waves"
    block "labels rest"
    empty=
    block "labels selector"
    if [ -n "$kind" ]; then
        # `nodes.sh install` would bring the file to the nodes; here all but this one is installed.
        block "${kind}config"
        for node in $NODES; do on "$node" tee "$CONFIG" <../site/config.conf >/dev/null; done
    else
        block start
    fi
    export wave LOGIN="${LOGIN-$(id -un)}"
    for wave in $WAVES; do
        echo "\$ wave=$wave"
        block "${kind}wave"
        block "${kind}gates" "$GATES"
        if [ "$wave" = 2 ]; then
            echo "wave 2 goes back, on purpose, and comes again"
            block "${kind}rollback"
            block "${kind}wave"
            block "${kind}gates" "$GATES"
        fi
        block "${kind}takeover"
    done
}
unwind() {
    export wave LOGIN="${LOGIN-$(id -un)}"
    for wave in $(for each in $WAVES; do echo "$each"; done | sort -r); do
        echo "\$ wave=$wave"
        block "${1:+$1 }rollback"
    done
    block back "" "${1:+2}" # its first command removes the pods
}

# Whether every request is answered, and who serves.
check() {
    kubectl get nodes
    kubectl -n kube-system get pods -o wide | grep -E '^NAME|proxy' || true
    for node in $NODES; do echo "agent of systemd on $node: $(on "$node" systemctl is-active hybrid-proxy)"; done
    answers=$(mktemp)
    for url in "http://$address" "http://$(hostname):30080"; do
        from_pod "$url" >>"$answers"
        from_node "$url" >>"$answers"
    done
    echo "from a pod and from $(hostname), to $address:80 and to the node port: $(tally <"$answers")"
    if grep -qx '' "$answers"; then rm "$answers"; return 1; fi
    rm "$answers"
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
    case "${1:-}" in
        check) REQUESTS=10; check; return ;;
        migrate | back) under_load "$1"; return ;;
        waves | unwind) under_load in_folder "$@"; return ;;
    esac
    # An agent does not start with a mode that is none.
    for mode; do
        case "$mode" in
            ebpf | nftables | iptables | ipvs | userspace) ;;
            *) echo "demo: $mode: neither a mode nor a command: vagrant/README.md lists them" >&2; return 2 ;;
        esac
    done
    on "$(hostname)" systemctl is-active -q hybrid-proxy || { echo "demo: no agent of systemd serves here: demo migrate" >&2; return 1; }
    [ $# -gt 0 ] || set -- ebpf nftables iptables ipvs userspace
    in_modes "$@"
}

# Sourced by a test, it only defines.
[ "${DEMO_SOURCED:-}" = yes ] || main "$@"
