{{- define "hybrid-proxy.labels" -}}
{{- $own := dict
  "app.kubernetes.io/name" "hybrid-proxy"
  "app.kubernetes.io/instance" .Release.Name
  "app.kubernetes.io/version" (.Chart.AppVersion | replace "+" "_")
  "app.kubernetes.io/part-of" "hybrid-proxy"
  "app.kubernetes.io/managed-by" .Release.Service
  "helm.sh/chart" (printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_"))
}}
{{- merge $own .Values.commonLabels | toYaml }}
{{- end }}

{{- define "hybrid-proxy.image" -}}
{{- if not (kindIs "string" .Values.image.tag) }}
{{- fail "image.tag: a number loses digits (1.20 becomes 1.2): quote it in a file of values, or type --set-string image.tag=..." }}
{{- end -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- with .Values.image.digest }}@{{ . }}{{ end }}
{{- end }}

{{- /* Folders of the node, for agents and for a phase, and the container that puts their system calls' profile there. */ -}}
{{- define "hybrid-proxy.volumes" -}}
- name: run
  hostPath: {path: /run/hybrid-proxy, type: DirectoryOrCreate}
- name: bpf
  hostPath: {path: /sys/fs/bpf, type: Directory}
- name: cgroup
  hostPath: {path: /sys/fs/cgroup, type: Directory}
- name: modules
  hostPath: {path: /lib/modules, type: Directory}
- name: xtables-lock
  hostPath: {path: /run/xtables.lock, type: FileOrCreate}
{{- if ne .Values.phase "takeover" }}
- name: seccomp
  hostPath: {path: {{ .Values.seccompFolder }}, type: DirectoryOrCreate}
{{- end }}
- name: tmp
  emptyDir: {medium: Memory, sizeLimit: 16Mi}
{{- end }}

{{- define "hybrid-proxy.mounts" -}}
- {name: run, mountPath: /run/hybrid-proxy}
- {name: bpf, mountPath: /sys/fs/bpf}
# Beside the container's own hierarchy: the agent takes the one that shows more. On a node that has version 1 too,
# each hierarchy is a mount of its own below, which `readOnly` alone leaves writable.
- name: cgroup
  mountPath: /host/sys/fs/cgroup
  readOnly: true
  recursiveReadOnly: IfPossible
- {name: modules, mountPath: /lib/modules, readOnly: true}
- {name: xtables-lock, mountPath: /run/xtables.lock}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "hybrid-proxy.profile" -}}
- name: seccomp-profile
  image: {{ include "hybrid-proxy.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  {{- if hasPrefix "cleanup" .Values.phase | or (eq .Values.phase "rollback") }}
  command: [rm, -f, /host/seccomp/hybrid-proxy.json]
  {{- else }}
  command: [cp, /usr/share/hybrid-proxy/seccomp.json, /host/seccomp/hybrid-proxy.json]
  {{- end }}
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
  resources: {{- toYaml .Values.initResources | nindent 4 }}
  volumeMounts:
    - {name: seccomp, mountPath: /host/seccomp}
{{- end }}

{{- /* Where the configuration is: kube-proxy's names its own kubeconfig by this folder. */ -}}
{{- define "hybrid-proxy.folder" -}}
{{ if .Values.kubeProxyConfigMap }}/var/lib/kube-proxy{{ else }}/etc/hybrid-proxy{{ end }}
{{- end }}

{{- /* The ports where the agent serves, as it finds them itself. Beside a kube-proxy they are not kube-proxy's. `scraped`: not
at loopback alone, so Prometheus finds the pod by the name of its port. `host`: where the kubelet asks instead of the
node's address. */ -}}
{{- define "hybrid-proxy.ports" -}}
{{- $addresses := pick .Values.kubeProxyConfiguration "healthzBindAddress" "metricsBindAddress" -}}
{{- if .Values.kubeProxyConfigMap }}{{ $_ := set $addresses "healthzBindAddress" .Values.kubeProxyHealthz }}{{ end -}}
{{- $name := .Values.hybridProxyConfiguration.serviceProxyName -}}
{{- range .Values.extraArgs -}}
{{- if hasPrefix "--metrics-bind-address=" . }}{{ $_ := set $addresses "metricsBindAddress" (trimPrefix "--metrics-bind-address=" . | default "no address") }}{{ end -}}
{{- if hasPrefix "--service-proxy-name=" . }}{{ $name = trimPrefix "--service-proxy-name=" . }}{{ end -}}
{{- end -}}
{{- $moved := empty $name | ternary dict (dict "10256" "10356" "10249" "10349") -}}
{{- range $server, $usual := dict "healthz" "10256" "metrics" "10249" }}
{{- $address := get $addresses (printf "%sBindAddress" $server) | default "" }}
{{- $port := regexFind "(\\]|^[^:]*):[1-9][0-9]*$" $address | regexFind "[0-9]+$" | default $usual }}
{{- $loopback := regexFind "^(127\\.[0-9.]+|\\[?::1(\\]|$))" $address | trimAll "[]" }}
{{ $server }}: {port: {{ get $moved $port | default $port }}{{ with $loopback }}, host: {{ quote . }}{{ end }}}
{{- end }}
{{- $metrics := get $addresses "metricsBindAddress" | default (ternary "0.0.0.0" "127.0.0.1" .Values.serviceMonitor.enabled) }}
{{- $served := ne (toString .Values.hybridProxyConfiguration.serveMetrics) "false" }}
{{- $scraped := and $served (not (regexMatch "^(127\\.|localhost|no address|\\[?::1(\\]|$))" $metrics)) }}
{{- if and .Values.serviceMonitor.enabled (not $scraped) }}
{{- fail (printf "serviceMonitor: Prometheus reaches no metrics %s: leave that out, or name the node's address" ($served | ternary (printf "at %s" $metrics) "with serveMetrics: false")) }}
{{- end }}
scraped: {{ $scraped }}
beside: {{ not (empty $name) }}
{{- end }}

{{- /* A cluster's own affinity, and in each of its terms the nodes that keep their kube-proxy are left out. */ -}}
{{- define "hybrid-proxy.affinity" -}}
{{- $affinity := deepCopy (.Values.affinity | default dict) -}}
{{- if and .Values.keepKubeProxy (not (include "hybrid-proxy.ports" . | fromYaml).beside) -}}
{{- $kept := dict "key" "hybrid-proxy.io/kube-proxy" "operator" "NotIn" "values" (list "yes") -}}
{{- $required := dig "nodeAffinity" "requiredDuringSchedulingIgnoredDuringExecution" dict $affinity -}}
{{- $terms := list -}}
{{- range $required.nodeSelectorTerms | default (list dict) -}}
{{- $terms = append $terms (merge (dict "matchExpressions" (append (.matchExpressions | default list) $kept)) .) -}}
{{- end -}}
{{- $node := dict "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms) -}}
{{- $affinity = mergeOverwrite $affinity (dict "nodeAffinity" $node) -}}
{{- end -}}
{{- with $affinity }}{{ toYaml . }}{{ end -}}
{{- end }}

{{- define "hybrid-proxy.capabilities" -}}
{{- if .Values.debug -}}
[BPF, NET_ADMIN, NET_RAW, PERFMON, SYS_ADMIN, SYS_PTRACE]
{{- else if has .Values.mode (list "auto" "ebpf") -}}
[BPF, NET_ADMIN, PERFMON]
{{- else if eq .Values.mode "iptables" -}}
[BPF, NET_ADMIN, NET_RAW]
{{- else if eq .Values.mode "nftables" -}}
[BPF, NET_ADMIN]
{{- else if eq .Values.mode "userspace" -}}
[NET_ADMIN]
{{- else -}}
{{ fail (printf "mode %q: choose auto, ebpf, nftables, iptables, ipvs or userspace" .Values.mode) }}
{{- end -}}
{{- end }}
