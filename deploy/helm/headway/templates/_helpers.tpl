{{- define "headway.labels" -}}
app.kubernetes.io/name: headway
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "headway.image" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end -}}

{{/* A value as TOML, maps as inline tables. JSON writes whole numbers without a point, as TOML's integers are. */}}
{{- define "headway.toml" -}}
{{- $value := . -}}
{{- if kindIs "map" . -}}
{ {{- range $i, $key := keys . | sortAlpha }}{{ if $i }}, {{ end }}{{ toRawJson $key }} = {{ include "headway.toml" (get $value $key) }}{{ end -}} }
{{- else if kindIs "slice" . -}}
[{{- range $i, $item := . }}{{ if $i }}, {{ end }}{{ include "headway.toml" $item }}{{ end -}}]
{{- else -}}
{{- toRawJson . -}}
{{- end -}}
{{- end -}}

{{/* The engines of a group that are in the configuration. */}}
{{- define "headway.count" -}}
{{- if .scale }}{{ max 1 (int .scale.max) }}{{ else }}{{ int .replicas }}{{ end -}}
{{- end -}}

{{/* The name of a group's model in the gateway. */}}
{{- define "headway.model" -}}
{{- .table.served_name | default (ternary .table.model (base .table.model) (hasKey .table "url")) -}}
{{- end -}}

{{/* "true" where clients need a key or a token. */}}
{{- define "headway.closed" -}}
{{- if or .Values.keys (dig "server" "stored_keys" false .Values.config) (dig "oidc" "issuer" "" .Values.config) }}true{{ end -}}
{{- end -}}

{{/* The scheme of the gateway's port, in capitals as probes have it. */}}
{{- define "headway.scheme" -}}
{{- if dig "server" "tls" "cert" "" .Values.config }}HTTPS{{ else }}HTTP{{ end -}}
{{- end -}}

{{/* The configuration that all parts read, as TOML. */}}
{{- define "headway.config" -}}
{{- $server := dict "host" "0.0.0.0" "drain_s" .Values.drainSeconds -}}
{{- if and .Values.ingress.enabled (not (include "headway.closed" .)) }}{{ $_ := set $server "hosts" (list .Values.ingress.host) }}{{ end -}}
{{- if .Values.operatorKey }}{{ $_ := set $server "operator_key" (printf "env:%s" .Values.operatorKey) }}{{ end -}}
{{- $config := dict "server" $server "log" (dict "format" "json") -}}
{{- if .Values.parts -}}
{{- $_ := set $config "wire" (dict "url" "env:HEADWAY_RABBITMQ_URL" "name" .Release.Name) -}}
{{- $postgres := dict "url" "env:HEADWAY_POSTGRES_URL" "schema" (.Release.Name | replace "-" "_" | replace "." "_") -}}
{{- $_ := set $config "broker" (dict "kind" "postgres" "postgres" $postgres) -}}
{{- else -}}
{{- $_ := set $config "broker" (dict "sqlite" (dict "path" "/var/lib/headway/queue.sqlite")) -}}
{{- end -}}
{{- $engines := list -}}{{- $scale := dict -}}
{{- range .Values.engines -}}
{{- $count := include "headway.count" . | int -}}
{{- $engines = append $engines (merge (dict "id" .name "count" $count) .table) -}}
{{- if .scale }}{{ $_ := set $scale (include "headway.model" .) .scale }}{{ end -}}
{{- end -}}
{{- $_ := set $config "engines" $engines -}}
{{- with $scale }}{{ $_ := set $config "scale" . }}{{ end -}}
{{- if .Values.picker.enabled }}{{ $_ := set $config "picker" (dict "port" 9002) }}{{ end -}}
{{- with .Values.classes }}{{ $_ := set $config "classes" . }}{{ end -}}
{{- $keys := list -}}
{{- range .Values.keys }}{{ $keys = append $keys (merge (dict "key" (printf "env:%s" .secretKey)) (omit . "secretKey")) }}{{ end -}}
{{- with $keys }}{{ $_ := set $config "keys" . }}{{ end -}}
{{- $config = mergeOverwrite $config (deepCopy .Values.config) -}}
{{- range $name := keys $config | sortAlpha }}
{{ $name }} = {{ include "headway.toml" (get $config $name) }}
{{- end -}}
{{- end -}}

{{/* What all pods have: no token of the cluster's API, and a restart when the configuration changes. */}}
{{- define "headway.pod" -}}
automountServiceAccountToken: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- end -}}

{{- define "headway.checksum" -}}
checksum/config: {{ include "headway.config" . | sha256sum }}
{{- end -}}

{{/* Agents do not restart, nor their engines, for other keys and prices, which only gateways use. */}}
{{- define "headway.agentChecksum" -}}
{{- $values := set (omit .Values "keys") "config" (omit .Values.config "prices") -}}
{{- $config := include "headway.config" (dict "Values" $values "Release" .Release) -}}
checksum/config: {{ printf "%s%s" $config (include "headway.closed" .) | sha256sum }}
{{- end -}}

{{- define "headway.claim" -}}
spec:
  accessModes: [ReadWriteOnce]
  {{- with .storageClass }}
  storageClassName: {{ . }}
  {{- end }}
  resources: {requests: {storage: {{ .size }}}}
{{- end -}}

{{/* Secrets as files: `secretFiles`. */}}
{{- define "headway.fileMounts" -}}
{{- range $secret, $folder := .Values.secretFiles }}
- {name: {{ $secret }}, mountPath: {{ $folder | quote }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "headway.fileVolumes" -}}
{{- range $secret, $_ := .Values.secretFiles }}
- {name: {{ $secret }}, secret: {secretName: {{ $secret }}}}
{{- end }}
{{- end }}
