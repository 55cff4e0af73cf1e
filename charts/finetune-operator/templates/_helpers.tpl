{{/* Name of everything that belongs to this release. */}}
{{- define "finetune-operator.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "finetune-operator.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "finetune-operator.labels" -}}
{{ include "finetune-operator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "finetune-operator.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
What the operator may do where FineTuneJobs are: one list for the ClusterRole and for the Roles of single namespaces.
No Secrets: pods name them, the operator never reads them. No creating of pods: the Job controller does that.
*/}}
{{- define "finetune-operator.rules" -}}
- apiGroups: [finetune.dev]
  resources: [finetunejobs]
  verbs: [get, list, watch]
- apiGroups: [finetune.dev]
  resources: [finetunejobs/status]
  verbs: [patch]
# Children block the deletion of their owner in the foreground; where owner references are policed that takes this right.
- apiGroups: [finetune.dev]
  resources: [finetunejobs/finalizers]
  verbs: [update]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, delete{{ if .Values.kueue.patchJobs }}, patch{{ end }}]
- apiGroups: [""]
  resources: [configmaps, services]
  verbs: [get, list, watch, create, delete]
# Deleted only if a Job left them behind, or by force where a profile allows it for nodes that are lost.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, delete]
# Why Kueue holds a Job back. Where Kueue is not installed this names nothing.
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [list{{ if .Values.kueue.patchWorkloads }}, patch{{ end }}]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, create]
- apiGroups: [""]
  resources: [events]
  verbs: [get, watch, create, patch]
{{- end -}}
