// Command second gives the document of KubeVirt's second definition, through its own types: as before
// the first, with the devices that libvirt printed after it (virtwrap, withNetworkIfacesResources).
package main

import (
	"encoding/json"
	"encoding/xml"
	"fmt"
	"os"

	"kubevirt.io/kubevirt/pkg/virt-launcher/virtwrap/api"
)

func main() {
	var c struct{ Before, Printed string }
	if err := json.NewDecoder(os.Stdin).Decode(&c); err != nil {
		panic(err)
	}
	var before, printed api.DomainSpec
	if err := xml.Unmarshal([]byte(c.Before), &before); err != nil {
		panic(err)
	}
	if err := xml.Unmarshal([]byte(c.Printed), &printed); err != nil {
		panic(err)
	}
	before.Devices = printed.Devices
	out, err := xml.Marshal(before)
	if err != nil {
		panic(err)
	}
	fmt.Println(string(out))
}
