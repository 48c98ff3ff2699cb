{{/* Labels of an object, and with a component those of its pods. */}}
{{- define "selector" -}}
app.kubernetes.io/name: cray-agents
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "labels" -}}
app.kubernetes.io/name: cray-agents
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "claim" -}}{{ .Values.root.existingClaim | default (printf "%s-root" .Release.Name) }}{{- end }}
{{- define "keys" -}}{{ .Values.keys.existingSecret | default (printf "%s-keys" .Release.Name) }}{{- end }}
{{- define "slurmKeys" -}}{{ .Values.slurm.slinky.existingSecret | default (printf "%s-slurm" .Release.Name) }}{{- end }}
{{- define "gateway" -}}{{ ternary "gateway" "controller" (gt (int .Values.gateways.count) 0) }}{{- end }}

{{/* cray-agents.toml: what the chart decides, then the user's settings. */}}
{{- define "settings" -}}
{{- $scheduler := ternary "local" "slurm" (eq .Values.slurm.kind "none") }}
{{- $own := dict "home" (printf "%s/cray-agents" .Values.root.path) "api_keys" "required" "scheduler" $scheduler }}
{{- $of := ternary (dict "replica_interface" "eth0") dict (eq .Values.slurm.kind "slinky") }}
{{- toToml (merge $own (deepCopy .Values.settings) $of) }}
{{- end }}

{{/* What values.schema.json cannot say. */}}
{{- define "check" -}}
{{- $jobs := hasPrefix "slurm:" (toString .Values.controller.replicas) }}
{{- $further := gt (int .Values.gateways.count) 0 }}
{{- if and $further (not $jobs) (ne (toString .Values.controller.replicas) "0") }}
{{- fail "gateways reach replicas in Slurm alone: give controller.replicas as slurm:N or slurm:MIN-MAX, or set gateways.count to 0" }}
{{- end }}
{{- if and $jobs (eq .Values.slurm.kind "none") }}
{{- fail "controller.replicas is slurm:..., and slurm.kind is none: set it to slinky or outside" }}
{{- end }}
{{- if and (gt (int .Values.controller.standbys) 0) (not $further) }}
{{- fail "a standby needs gateways, which find the controller that follows: set gateways.count, or controller.standbys to 0" }}
{{- end }}
{{- if and $jobs (eq .Values.slurm.kind "outside") (not .Values.settings.replica_interface) }}
{{- fail "nodes outside cannot look up this pod: name the network interface of theirs that pods reach, in settings.replica_interface" }}
{{- end }}
{{- if and .Values.monitoring.enabled (ne (get .Values.keys.roles "metrics") "use") }}
{{- fail "monitoring asks with the key `metrics`: set keys.roles.metrics to use" }}
{{- end }}
{{- $policy := .Values.networkPolicy }}
{{- $closed := or $further $policy.clients (eq .Values.slurm.kind "slinky") }}
{{- if and .Values.monitoring.enabled $policy.enabled $closed (not $policy.monitoring) }}
{{- fail "monitoring is on, and the network policy would let no Prometheus in: name its peers in networkPolicy.monitoring" }}
{{- end }}
{{- if eq .Values.slurm.kind "slinky" }}
{{- $slinky := .Values.slurm.slinky }}
{{- if not $slinky.nodeSets }}
{{- fail "slurm.kind is slinky, and no node would be there: name one in slurm.slinky.nodeSets" }}
{{- end }}
{{- range concat (list "slurmctld" "slurmrestd" "sackd") (ternary (list "login") list (gt (int $slinky.login.replicas) 0)) }}
{{- if not (get $slinky.images .) }}
{{- fail (printf "slurm.slinky.images.%s is empty, and `image` cannot be %s: name SchedMD's image of it, of the Slurm that the nodes have" . .) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and (eq .Values.slurm.kind "outside") (eq .Values.slurm.outside.auth "slurm") (not .Values.slurm.outside.image) }}
{{- fail "slurm.outside.auth is slurm, and slurm.outside.image is empty: name an image with sackd, such as SchedMD's, of the site's Slurm" }}
{{- end }}
{{- end }}

{{- define "safe" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "mounts" -}}
- {name: root, mountPath: {{ .Values.root.path }}}
- {name: settings, mountPath: /etc/cray-agents}
- {name: scratch, mountPath: /tmp, subPath: tmp}
- {name: scratch, mountPath: /var/tmp, subPath: var-tmp}
{{- end }}

{{- define "volumes" -}}
- {name: root, persistentVolumeClaim: {claimName: {{ include "claim" . }}}}
- {name: settings, configMap: {name: {{ .Release.Name }}-settings}}
- {name: scratch, emptyDir: {}}
{{- end }}

{{/* Metadata and first fields of a pod of ours. Without enableServiceLinks: false a Service named
cray-agents would set CRAY_AGENTS_PORT, which is a setting. */}}
{{- define "pod" -}}
metadata:
  labels:
    {{- include "selector" . | nindent 4 }}
    cray-agents/release: {{ .root.Release.Name }}
  annotations: {checksum/settings: {{ include "settings" .root | sha256sum }}}
spec:
  enableServiceLinks: false
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ int .root.Values.controller.drainSeconds }}
  securityContext:
    runAsNonRoot: true
    runAsUser: {{ int .root.Values.user.uid }}
    runAsGroup: {{ int .root.Values.user.gid }}
    fsGroup: {{ int .root.Values.user.gid }}
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "selector" . | nindent 10 }}
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets: {{ toJson . }}
  {{- end }}
  {{- with .values.runtimeClass }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .values.nodeSelector }}
  nodeSelector: {{ toJson . }}
  {{- end }}
  {{- with .values.tolerations }}
  tolerations: {{ toJson . }}
  {{- end }}
{{- end }}

{{/* Fields of a container that serves HTTP. All gateways share the replicas, so none of them gets
unready for want of one: it answers 503 with the reason, or lets the request wait. */}}
{{- define "serves" -}}
ports: [{name: http, containerPort: 8000}]
startupProbe: {httpGet: {path: /health/live, port: http}, periodSeconds: 5, failureThreshold: 120}
readinessProbe: {httpGet: {path: /health/live, port: http}, periodSeconds: 5}
livenessProbe: {httpGet: {path: /health/live, port: http}, periodSeconds: 10, timeoutSeconds: 10, failureThreshold: 6}
lifecycle: {preStop: {sleep: {seconds: 5}}}
{{- end }}
