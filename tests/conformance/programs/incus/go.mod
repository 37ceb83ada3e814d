module github.com/lxc/incus/v6/conformance

go 1.23.7

require (
	github.com/lxc/incus/v6 v6.15.0
	gopkg.in/yaml.v2 v2.4.0
)

require (
	github.com/adhocore/gronx v1.19.6 // indirect
	github.com/digitalocean/go-smbios v0.0.0-20180907143718-390a4f403a8e // indirect
	github.com/flosch/pongo2/v6 v6.0.0 // indirect
	github.com/google/uuid v1.6.0 // indirect
	github.com/jaypipes/pcidb v1.0.1 // indirect
	github.com/kballard/go-shellquote v0.0.0-20180428030007-95032a82bc51 // indirect
	github.com/mitchellh/go-homedir v1.1.0 // indirect
	github.com/pkg/xattr v0.4.12 // indirect
	go.starlark.net v0.0.0-20250717191651-336a4b3a6d1d // indirect
	golang.org/x/sys v0.34.0 // indirect
	golang.org/x/text v0.27.0 // indirect
)
