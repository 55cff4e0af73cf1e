{{- define "finetune-operator.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{/* Name of the release's objects in namespaces. */}}
{{- define "finetune-operator.fullname" -}}
{{- $name := include "finetune-operator.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Name of the release's cluster-scoped objects; releases of the same name in other namespaces have other names. */}}
{{- define "finetune-operator.clusterName" -}}
{{ include "finetune-operator.fullname" . }}-{{ .Release.Namespace }}
{{- end -}}

{{- define "finetune-operator.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "finetune-operator.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{- define "finetune-operator.selector" -}}
app.kubernetes.io/name: {{ include "finetune-operator.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "finetune-operator.labels" -}}
{{ include "finetune-operator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels and annotations of an object. In: the root; further annotations. */}}
{{- define "finetune-operator.metadata" -}}
labels: {{- include "finetune-operator.labels" (index . 0) | nindent 2 }}
{{- with merge (dict) (index . 1) (index . 0).Values.commonAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Full name of an image. In: the root; an image of the values. */}}
{{- define "finetune-operator.imageOf" -}}
{{- $root := index . 0 -}}
{{- with index . 1 -}}
{{- $registry := .registry | default $root.Values.global.imageRegistry -}}
{{- with $registry }}{{ . | trimSuffix "/" }}/{{ end -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $root.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Environment of our programs: a proxy, and what the values add. */}}
{{- define "finetune-operator.environment" -}}
{{- $environment := list -}}
{{- range $variable, $value := dict "HTTP_PROXY" .Values.proxy.httpProxy "HTTPS_PROXY" .Values.proxy.httpsProxy "NO_PROXY" .Values.proxy.noProxy -}}
{{- if $value -}}
{{- $environment = append $environment (dict "name" $variable "value" $value) -}}
{{- end -}}
{{- end -}}
{{- concat $environment .Values.extraEnv | toYaml -}}
{{- end -}}

{{/*
Fails if another release serves a namespace of this one: both operators would write to the same jobs. A release that is scaled to
zero serves none. Only the cluster knows this, so nothing is checked where Helm renders without one (`helm template`, Argo CD), nor
where it is used without rights in the cluster.
*/}}
{{- define "finetune-operator.refuseSharedNamespaces" -}}
{{- if and .Values.rbac.create (gt (int .Values.replicas) 0) -}}
{{- range (lookup "apps/v1" "Deployment" "" "").items -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $release := get $labels "app.kubernetes.io/instance" -}}
{{- $isThisRelease := and (eq .metadata.namespace $.Release.Namespace) (eq $release $.Release.Name) -}}
{{- if and (hasPrefix (printf "%s-" $.Chart.Name) (get $labels "helm.sh/chart")) (gt (int .spec.replicas) 0) (not $isThisRelease) -}}
{{- $theirs := list -}}
{{- range .spec.template.spec.containers -}}
{{- range .args -}}
{{- if hasPrefix "--namespace=" . -}}
{{- $theirs = append $theirs (trimPrefix "--namespace=" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $shared := concat $.Values.namespaces $theirs | default (list "all namespaces") -}}
{{- if and $.Values.namespaces $theirs -}}
{{- $shared = list -}}
{{- range $.Values.namespaces -}}
{{- if has . $theirs -}}
{{- $shared = append $shared . -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $shared -}}
{{- fail (printf "release %s in namespace %s serves %s already, and two releases must not serve the same namespace: uninstall one of them, or give each its own list of namespaces" $release .metadata.namespace (join ", " $shared)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Claims that the job of `helm test` names: those of its pvc:// addresses, and its workspace. Keys of a mapping. */}}
{{- define "finetune-operator.testClaims" -}}
{{- range regexFindAll "\"pvc://[^/\"]+" (toJson .Values.test.job) -1 }}
{{ trimPrefix "\"pvc://" . }}: true
{{- end }}
{{- with .Values.test.job.workspace }}{{- with .claimName }}
{{ . }}: true
{{- end }}{{- end }}
{{- end -}}

{{/* Name of the ClusterRole that lets its subjects see a profile, and that owns the profile. In: the root; the profile's name. */}}
{{- define "finetune-operator.profileRole" -}}
{{ include "finetune-operator.clusterName" (index . 0) }}-profile-{{ index . 1 }}
{{- end -}}

{{/* The profiles as `finetune_operator.apply_profiles` reads them. */}}
{{- define "finetune-operator.profiles" -}}
{{- $root := . -}}
{{- $labels := merge (dict) .Values.commonLabels (dict "app.kubernetes.io/managed-by" .Release.Service) (fromYaml (include "finetune-operator.selector" .)) -}}
{{- $profiles := list -}}
{{- range $name, $written := .Values.profiles -}}
{{- $spec := merge (dict) $written (dict "trainerImage" (include "finetune-operator.imageOf" (list $root $root.Values.trainerImage))) -}}
{{- if and $root.Values.caBundle.configMap (not $written.caBundle) -}}
{{- $spec = merge (dict "caBundle" $root.Values.caBundle) $spec -}}
{{- end -}}
{{- $owner := include "finetune-operator.profileRole" (list $root $name) -}}
{{- $profiles = append $profiles (dict "name" $name "owner" $owner "labels" $labels "spec" $spec) -}}
{{- end -}}
{{- toJson $profiles -}}
{{- end -}}

{{/*
What the operator may do where FineTuneJobs are: one list for the ClusterRole and for the Roles of single namespaces.
It has no right to Secrets, which pods name and the operator never reads, and none to create pods, which the Job controller does.
*/}}
{{- define "finetune-operator.rules" -}}
- apiGroups: [finetune.dev]
  resources: [finetunejobs]
  verbs: [get, list, watch]
- apiGroups: [finetune.dev]
  resources: [finetunejobs/status]
  verbs: [patch]
# Children block the deletion of their owner in the foreground, which needs this right if the cluster checks owner references.
- apiGroups: [finetune.dev]
  resources: [finetunejobs/finalizers]
  verbs: [update]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, delete{{ if .Values.kueue.patchJobs }}, patch{{ end }}]
- apiGroups: [""]
  resources: [configmaps, services]
  verbs: [get, list, watch, create, delete]
# Pods are deleted only if a Job left them behind, or by force if a profile allows that for lost nodes.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, delete]
# The reason for which Kueue holds a Job back. Without Kueue there are no such objects.
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [list]
{{- if .Values.kueue.readQueues }}
- apiGroups: [kueue.x-k8s.io]
  resources: [localqueues, clusterqueues]
  verbs: [get]
{{- end }}
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, create]
# The labels of a job's namespace, if its profile has a namespaceSelector. A Role gives the right to its own namespace.
- apiGroups: [""]
  resources: [namespaces]
  verbs: [get]
{{- if .Values.rbac.readNodes }}
# Conditions of nodes, if the profile names some that report broken GPUs.
- apiGroups: [""]
  resources: [nodes]
  verbs: [get]
{{- end }}
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, create, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [get, list, watch, create, patch]
{{- end -}}
