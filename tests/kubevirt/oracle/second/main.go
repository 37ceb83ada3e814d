// Command second gives the hook the documents of KubeVirt's two definitions, through KubeVirt's own
// types, hook manager and gRPC. The second document is as before the first definition, with the
// devices that libvirt printed after it (virtwrap, withNetworkIfacesResources).
package main

import (
	"encoding/json"
	"encoding/xml"
	"fmt"
	"os"
	"time"

	v1 "kubevirt.io/api/core/v1"

	"kubevirt.io/kubevirt/pkg/hooks"
	"kubevirt.io/kubevirt/pkg/virt-launcher/virtwrap/api"
)

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	var c struct {
		Before, Printed string
		VMI             v1.VirtualMachineInstance
	}
	check(json.NewDecoder(os.Stdin).Decode(&c))
	var document api.DomainSpec
	check(xml.Unmarshal([]byte(c.Before), &document))
	if c.Printed != "" {
		var printed api.DomainSpec
		check(xml.Unmarshal([]byte(c.Printed), &printed))
		document.Devices = printed.Devices
	}
	manager := hooks.GetManager()
	check(manager.Collect(1, 20*time.Second))
	placed, err := manager.OnDefineDomain(&document, &c.VMI)
	check(err)
	given, err := xml.Marshal(document)
	check(err)
	check(json.NewEncoder(os.Stdout).Encode(map[string]string{"Given": string(given), "Placed": placed}))
}
