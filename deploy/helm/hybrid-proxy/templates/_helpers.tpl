{{- define "hybrid-proxy.labels" -}}
app.kubernetes.io/name: hybrid-proxy
app.kubernetes.io/part-of: hybrid-proxy
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "hybrid-proxy.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* Where the configuration is: kube-proxy's names its own kubeconfig by this folder. */ -}}
{{- define "hybrid-proxy.folder" -}}
{{ if .Values.kubeProxyConfigMap }}/var/lib/kube-proxy{{ else }}/etc/hybrid-proxy{{ end }}
{{- end }}

{{- define "hybrid-proxy.capabilities" -}}
{{- if has .Values.mode (list "auto" "ebpf") -}}
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
