#!/bin/sh
# Overlays of your own, in `site` next to this tree: one over each that the pages type, and the image's name once for all.
#
#   sh deploy/site.sh IMAGE [TAG [API_SERVER]]
#   sh deploy/site.sh registry.example/hybrid-proxy 0.1.0
#   sh deploy/site.sh hybrid-proxy "" https://10.0.0.1:6443      makes `agents`, too, which name the API server
#   sh deploy/site.sh                                            after an upgrade of the tree: the overlays lead to the new one
#   sh deploy/site.sh "" 0.2.0                                   another tag
#
# What is not given stays as it is in `site`, and so does everything that you wrote there. Without TAG, the tree's counts.
set -eu
image=${1-} tag=${2-} server=${3-}
cd "$(dirname "$0")/.."
tree=$(basename "$PWD") names=../site/image/kustomization.yaml
case ${image##*/} in *:* | *@*) echo "$image: the tag is the second word" >&2; exit 2 ;; esac
case $server in "" | http://* | https://*) ;; *) echo "$server: not an address such as https://10.0.0.1:6443" >&2; exit 2 ;; esac
if [ ! -e "$names" ] && [ -z "$image" ]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' deploy/site.sh >&2
    exit 2
fi

mkdir -p ../site/image
[ -e "$names" ] || cat >"$names" <<EOF
apiVersion: kustomize.config.k8s.io/v1alpha1
kind: Component
images:
  - {name: hybrid-proxy, newName: hybrid-proxy, newTag: ""}
EOF
for name in kubeadm census takeover rollback cleanup cleanup-drain; do
    [ ! -e "../site/$name" ] || continue
    mkdir "../site/$name"
    printf '%s\n' "resources: [../../$tree/deploy/overlays/$name]" 'components: [../image]' >"../site/$name/kustomization.yaml"
done
if [ "$server" ]; then
    if [ ! -e ../site/agents ]; then
        mkdir ../site/agents
        cp deploy/base/kubeconfig.conf ../site/agents
        cat >../site/agents/kustomization.yaml <<EOF
resources: [../../$tree/deploy/base]
components: [../image]
configMapGenerator:
  - {name: hybrid-proxy, namespace: kube-system, behavior: merge, files: [kubeconfig.conf]}
generatorOptions: {disableNameSuffixHash: true}
EOF
    fi
    sed -i.old "s#server: .*#server: $server#" ../site/agents/kubeconfig.conf
    rm ../site/agents/kubeconfig.conf.old
fi
sed -i.old "s#\.\./\.\./[^],/ ]*/deploy/#../../$tree/deploy/#g" ../site/*/kustomization.yaml
# KEY VALUE: of the image.
name() {
    sed -i.old "/{name: hybrid-proxy,/s#$1: [^,}]*#$1: $2#" "$names"
    grep -qF "$1: $2" "$names" || { echo "$names does not have it as this script writes it: write $1: $2 there" >&2; exit 1; }
}
[ -z "$image" ] || name newName "$image"
[ -z "$tag" ] || name newTag "\"$tag\""
rm ../site/*/kustomization.yaml.old
grep -Hn '/deploy/\|newName' ../site/*/kustomization.yaml
