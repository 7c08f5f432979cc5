{{- define "kvtier.labels" -}}
app.kubernetes.io/name: kvtier
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvtier.name" -}}
{{ if eq .Release.Name "kvtier" }}kvtier{{ else }}{{ printf "%s-kvtier" .Release.Name | trunc 63 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- /* The tenants whose secrets are handed over, and the Secret that has them. */ -}}
{{- define "kvtier.secretTenants" -}}
{{ if .Values.secrets.existing }}{{ toJson .Values.secrets.tenants }}{{ else }}{{ keys .Values.secrets.data | sortAlpha | toJson }}{{ end }}
{{- end }}
{{- define "kvtier.secretName" -}}
{{ .Values.secrets.existing | default (printf "%s-tenants" (include "kvtier.name" .)) }}
{{- end }}

{{- define "kvtier.resources" -}}
{{- if .Values.resources }}
{{- toYaml .Values.resources }}
{{- else }}
{{- if not (regexMatch "^[1-9][0-9]*GiB$" .Values.warm.size) }}
{{- fail (printf "warm.size is %s: write whole GiB, such as 64GiB" .Values.warm.size) }}
{{- end }}
{{- $warm := trimSuffix "GiB" .Values.warm.size | atoi }}
{{- $limits := dict "memory" (printf "%dGi" (add1 $warm)) }}
{{- if .Values.warm.hugePages }}
{{- $limits = dict "memory" "1Gi" "hugepages-2Mi" (printf "%dGi" $warm) }}
{{- end }}
{{- toYaml (dict "limits" $limits "requests" (merge (dict "cpu" .Values.cpuRequest) $limits)) }}
{{- end }}
{{- end }}
