#!/bin/sh
# Steps of docs/migration.md (With services of systemd) on the Ready nodes of Linux with a label: by ssh at the node's name,
# as root or as LOGIN, who may use sudo without a password. Each line begins with the node that says it.
#
#   sh nodes.sh install hybrid-proxy.io/wave=1     installs or upgrades (docs/operations.md); restarts an agent that runs
#   sh nodes.sh start hybrid-proxy.io/wave=1       starts the service, and waits until its agent serves
#   sh nodes.sh takeover hybrid-proxy.io/wave=1    removes what kube-proxy left
#   sh nodes.sh stop hybrid-proxy.io/wave=1        ends the service; what it programmed serves
#   sh nodes.sh cleanup hybrid-proxy.io/wave=1     waits for kube-proxy's first sync, and removes what the agent left
#   sh nodes.sh remove hybrid-proxy.io/wave=1      ends the service, and removes what install put there but Debian's packages
#
# takeover and cleanup begin on all nodes at once, because each may wait long for open flows, and the others on AT_ONCE (10).
# install begins on no more nodes after it has failed on one. It takes the wheel and requirements.txt from the folder RELEASE
# (.), NODE.conf from the folder KUBECONFIGS (.), and the configuration CONFIG (deploy/base/config.conf). A node keeps the
# configuration that it has, and says so where that is another; with REPLACE=yes it gets CONFIG, which is then required.
# Without NODE.conf it keeps its kubeconfig. Where RELEASE has a folder `wheels`, all Python packages come from there, and no
# package index is asked.
# remove leaves what the agent programmed, which serves on until the next boot; with CLEANUP=yes it removes that first.
# Exit code 1: it failed on a node, or no Ready node has the label. LONGEST is how many seconds it waits for a proxy, DRAIN
# how many for open flows (default of cleanup: until the last one is over; of remove: 3, or 0 where no other proxy is),
# METRICS another address of kube-proxy's metrics.
set -eu
: "${LOGIN:=root}" "${LONGEST:=600}" "${DRAIN:=}" "${METRICS:=http://127.0.0.1:10249/metrics}"
here=$(dirname "$0")
: "${AT_ONCE:=10}" "${RELEASE:=.}" "${KUBECONFIGS:=.}" "${CONFIG:=}" "${CLEANUP:=no}" "${REPLACE:=no}"
new=/opt/hybrid-proxy/new
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
serving() {
    await hybrid-proxy status --exit-code || { hybrid-proxy status; return 1; }
    hybrid-proxy status | head -n 1
}
start() {
    systemctl enable -q --now hybrid-proxy
    serving
}
# What RELEASE.md and docs/operations.md say, with files that are in `new`: NODE.conf there, all others in `files`.
install_all() {
    trap 'rm -rf "$new"' EXIT
    cd "$new/files"
    if [ ! -x /opt/hybrid-proxy/bin/pip ]; then
        packages="python3-venv libbpf1 iptables"
        ! command -v apt-get || dpkg -s $packages || { apt-get update -q && apt-get install -q -y $packages; }
        python3 -m venv /opt/hybrid-proxy
    fi >/dev/null
    [ ! -d wheels ] || export PIP_NO_INDEX=yes PIP_FIND_LINKS=wheels
    /opt/hybrid-proxy/bin/pip install --quiet --require-hashes -r requirements.txt
    # A build of the same version replaces another one, too.
    /opt/hybrid-proxy/bin/pip install --quiet --no-deps --force-reinstall ./hybrid_proxy-*_"$(uname -m)".whl
    mkdir -p /usr/local/bin /usr/local/share/man/man8
    ln -sf /opt/hybrid-proxy/bin/hybrid-proxy /usr/local/bin/
    ln -sf /opt/hybrid-proxy/share/man/man8/hybrid-proxy.8 /usr/local/share/man/man8/
    install -d -m 700 /etc/hybrid-proxy
    for each in ../*.conf; do
        [ ! -e "$each" ] || install -m 600 "$each" /etc/hybrid-proxy/kubeconfig.conf
    done
    [ -e /etc/hybrid-proxy/kubeconfig.conf ] || { echo "neither a kubeconfig, nor NODE.conf for it"; return 1; }
    if [ "$REPLACE" = yes ] || [ ! -e /etc/hybrid-proxy/config.conf ]; then install -m 600 config.conf /etc/hybrid-proxy/; fi
    cmp -s config.conf /etc/hybrid-proxy/config.conf || echo "keeps its own /etc/hybrid-proxy/config.conf"
    install -D -m 644 -t /etc/systemd/system hybrid-proxy.service
    systemctl daemon-reload
    if systemctl is-active -q hybrid-proxy; then systemctl restart hybrid-proxy && serving; else echo installed; fi
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
# Files of others in these folders stay.
remove() {
    [ -e /opt/hybrid-proxy ] || { echo "nothing to remove"; return; }
    [ ! -e /etc/systemd/system/hybrid-proxy.service ] || stop
    [ "$CLEANUP" != yes ] || hybrid-proxy cleanup ${DRAIN:+--drain "$DRAIN"}
    rm -rf /etc/systemd/system/hybrid-proxy.service /etc/systemd/system/hybrid-proxy.service.d
    systemctl daemon-reload
    rm -f /etc/hybrid-proxy/config.conf /etc/hybrid-proxy/kubeconfig.conf
    [ ! -d /etc/hybrid-proxy ] || rmdir --ignore-fail-on-non-empty /etc/hybrid-proxy
    rm -rf /usr/local/bin/hybrid-proxy /usr/local/share/man/man8/hybrid-proxy.8 /opt/hybrid-proxy
    echo removed
}
set -e
"$step"
STEPS
# What is said again and again is printed once. xargs begins nothing more after an exit code of 255.
cat >"$folder/lines" <<'LINES'
$0 != last { print node ": " $0; fflush() }
{ last = $0 }
END { exit last ~ /^FAILED \(/ ? code : 0 }
LINES

case "${1:-}" in install | start | takeover | stop | cleanup | remove) ;; *) set -- ;; esac
[ $# -eq 2 ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
step=$1 code=0
case "$step" in
    takeover | cleanup) AT_ONCE=0 ;;
    install)
        step=install_all code=255
        if [ "$REPLACE" = yes ] && [ -z "$CONFIG" ]; then
            echo "nodes: REPLACE=yes replaces each node's config.conf: name the new one, as CONFIG=FILE" >&2
            exit 2
        fi
        mkdir "$folder/files"
        cp "$RELEASE"/hybrid_proxy-*.whl "$RELEASE/requirements.txt" "$here/hybrid-proxy.service" "$folder/files"
        cp "${CONFIG:-$here/../base/config.conf}" "$folder/files/config.conf"
        [ ! -d "$RELEASE/wheels" ] || cp -r "$RELEASE/wheels" "$folder/files"
        ;;
esac
{ printf 'step=%s new=%s LONGEST=%s DRAIN=%s METRICS=%s CLEANUP=%s REPLACE=%s\n' "$step" "$new" "$LONGEST" "$DRAIN" "$METRICS" "$CLEANUP" "$REPLACE"; cat "$folder/steps"; } >"$folder/script"
# On one node: its files, if there are any, and the step.
cat >"$folder/reach" <<'REACH'
reach() { ssh -o BatchMode=yes "$LOGIN@$node" "$shell$1" 2>&1; }
node=$1
{
    {
        if [ -e "$folder/files" ]; then
            set -- -C "$folder" files
            [ ! -e "$KUBECONFIGS/$node.conf" ] || set -- -C "$KUBECONFIGS" "$node.conf" "$@"
            tar cf - "$@" | reach " -c 'mkdir -p ${new%/*} && rm -rf $new && mkdir -m 700 $new && tar xof - -C $new'"
        fi && reach "" <"$folder/script"
    } || echo "FAILED ($?)"
} | awk -v node="$node" -v code="$code" -f "$folder/lines"
REACH
ready='{.status.conditions[?(@.type=="Ready")].status}'
kubectl get nodes -l "$2,kubernetes.io/os=linux" -o "jsonpath={range .items[*]}{.metadata.name} $ready{'\n'}{end}" >"$folder/nodes"
awk '$2 == "True" { print $1 }' "$folder/nodes" >"$folder/reached"
awk '$2 != "True" { print $1 ": left out, because it is not Ready" }' "$folder/nodes" >&2
[ -s "$folder/reached" ] || { echo "nodes: no Ready node of Linux has the label $2" >&2; exit 1; }
[ "$LOGIN" = root ] && shell="sh" || shell='sudo -n sh'
export LOGIN shell folder code new KUBECONFIGS
xargs -n 1 -P "$AT_ONCE" sh "$folder/reach" <"$folder/reached" | tee "$folder/said"
! grep -q ': FAILED ([0-9]*)$' "$folder/said"
