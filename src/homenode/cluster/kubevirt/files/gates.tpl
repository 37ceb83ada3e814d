{{- /* Merge patch of a KubeVirt CR: the feature gates that it has, then ours. */ -}}
{"metadata": {"resourceVersion": "{{.metadata.resourceVersion}}"},
 "spec": {"configuration": {"developerConfiguration": {"featureGates": [
{{- with .spec.configuration}}{{with .developerConfiguration}}{{range .featureGates}}
{{- if not (eq . @WORDS@)}}
  {{printf "%q" .}},
{{- end}}{{end}}{{end}}{{end}}
  @LIST@
 ]}}}}
