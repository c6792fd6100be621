#!/bin/sh
# The objects of a step of docs/migration.md: the chart's where ../site/values.yaml is, and otherwise those of ../site/NAME.
#
#   sh deploy/objects.sh apply kubeadm       the agents, as `agents` does; any other NAME is a step
#   sh deploy/objects.sh delete census
#
# It prints the command of kubectl or helm, and becomes it.
set -eu
verb=${1-} name=${2-}
case "$verb $name" in
    "apply "?* | "delete "?*) ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
cd "$(dirname "$0")/.."
case $name in kubeadm | agents) release=hybrid-proxy phase="" ;; *) release=hybrid-proxy-$name phase=$name ;; esac
if [ ! -e ../site/values.yaml ]; then
    set -- kubectl "$verb" -k "../site/$name"
elif [ "$verb" = delete ]; then
    set -- helm uninstall "$release" -n kube-system
else
    set -- helm upgrade --install "$release" deploy/helm/hybrid-proxy -n kube-system -f ../site/values.yaml ${phase:+--set "phase=$phase"}
fi
echo "+ $*" >&2
exec "$@"
