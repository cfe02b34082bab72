{{- define "vlmserve.name" -}}
{{- if contains "vlmserve" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-vlmserve" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "vlmserve.selector" -}}
app.kubernetes.io/name: vlmserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "vlmserve.labels" -}}
{{ include "vlmserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- /* What a client in the cluster may write as the host, and what the values allow beside it. */ -}}
{{- define "vlmserve.hosts" -}}
{{- $name := include "vlmserve.name" . -}}
{{- $own := list $name (printf "%s.%s" $name .Release.Namespace) (printf "%s.%s.svc" $name .Release.Namespace) (printf "%s.%s.svc.cluster.local" $name .Release.Namespace) -}}
{{- concat $own .Values.allowedHosts | toJson -}}
{{- end }}
