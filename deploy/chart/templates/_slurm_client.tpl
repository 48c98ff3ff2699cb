{{/* How the controller's pod is a client of Slurm: slurm.conf, and a daemon beside it that signs its
requests, with the cluster's key. The daemon is root, who owns the key, without capabilities. No image
of SchedMD's has both sackd and slurmd, so that sackd's is another than ours. */}}
{{- define "slurmClient" -}}
{{- if ne .Values.slurm.kind "none" }}
{{- $munge := and (eq .Values.slurm.kind "outside") (eq .Values.slurm.outside.auth "munge") }}
- name: {{ ternary "munged" "sackd" $munge }}
  image: {{ ternary .Values.slurm.slinky.images.sackd .Values.slurm.outside.image (eq .Values.slurm.kind "slinky") | default .Values.image }}
  restartPolicy: Always
  {{- if $munge }}
  command: [munged, --foreground, --force, --key-file=/keys/munge.key, --pid-file=/run/munge/munged.pid, --seed-file=/run/munge/munge.seed]
  {{- else if eq .Values.slurm.kind "slinky" }}
  command: [sackd, -D, --key-file, /keys/slurm.key, --conf-server, {{ .Release.Name }}-slurm-controller.{{ .Release.Namespace }}:6817]
  {{- else }}
  command: [sackd, -D, --key-file, /keys/slurm.key, -f, /etc/slurm/slurm.conf]
  {{- end }}
  startupProbe: {exec: {command: [test, -S, {{ ternary "/run/munge/munge.socket.2" "/run/slurm/sack.socket" $munge }}]}, periodSeconds: 2, failureThreshold: 150}
  securityContext:
    runAsUser: 0
    runAsNonRoot: false
    {{- include "safe" . | nindent 4 }}
  volumeMounts:
    - {name: slurm-keys, mountPath: /keys, readOnly: true}
    {{- include "slurmMounts" . | nindent 4 }}
{{- end }}
{{- end }}

{{- define "slurmMounts" -}}
{{- if ne .Values.slurm.kind "none" }}
- {name: slurm-run, mountPath: {{ ternary "/run/munge" "/run/slurm" (and (eq .Values.slurm.kind "outside") (eq .Values.slurm.outside.auth "munge")) }}}
{{- if eq .Values.slurm.kind "outside" }}
- {name: slurm-conf, mountPath: /etc/slurm, readOnly: true}
{{- end }}
{{- end }}
{{- end }}

{{- define "slurmVolumes" -}}
{{- if ne .Values.slurm.kind "none" }}
- {name: slurm-run, emptyDir: {medium: Memory}}
- name: slurm-keys
  secret: {secretName: {{ ternary (include "slurmKeys" .) .Values.slurm.outside.secret (eq .Values.slurm.kind "slinky") }}, defaultMode: 0400}
{{- if eq .Values.slurm.kind "outside" }}
- {name: slurm-conf, configMap: {name: {{ .Values.slurm.outside.configMap }}}}
{{- end }}
{{- end }}
{{- end }}
