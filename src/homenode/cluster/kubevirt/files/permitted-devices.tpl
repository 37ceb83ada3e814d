{{- /* Merge patch of a KubeVirt CR: the PCI devices that it permits, then the GPU. */ -}}
{{- /* Set this to true where a device plugin of the vendor's announces the GPU. */ -}}
{{- $external := false -}}
{"metadata": {"resourceVersion": "{{.metadata.resourceVersion}}"},
 "spec": {"configuration": {"permittedHostDevices": {"pciHostDevices": [
{{- with .spec.configuration}}{{with .permittedHostDevices}}{{range .pciHostDevices}}
{{- if and (eq .pciVendorSelector "@UPPER@" "@LOWER@") (eq .resourceName "@GPU@")}}
{{- $external = or $external .externalResourceProvider false}}
{{- else}}
  {"pciVendorSelector": {{printf "%q" .pciVendorSelector}},
   "resourceName": {{printf "%q" .resourceName}},
   "externalResourceProvider": {{or .externalResourceProvider false}}},
{{- end}}{{end}}{{end}}{{end}}
  {"pciVendorSelector": "@UPPER@",
   "resourceName": "@GPU@",
   "externalResourceProvider": {{$external}}}
 ]}}}}
