// Command chain defines a VMI as virt-launcher does: converter, defaults, hook manager with the hook
// over gRPC, virsh. KubeVirt defines it first with interfaces that only keep ports free, then with the
// devices that libvirt printed of the first, since v1.8 a third time with root ports after them
// (virtwrap: allocateHotplugPorts). It prints the document given, placed and printed of each.
package main

import (
	"encoding/json"
	"encoding/xml"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"time"

	v1 "kubevirt.io/api/core/v1"

	cmdv1 "kubevirt.io/kubevirt/pkg/handler-launcher-com/cmd/v1"
	"kubevirt.io/kubevirt/pkg/hooks"
	"kubevirt.io/kubevirt/pkg/virt-launcher/virtwrap/api"
	"kubevirt.io/kubevirt/pkg/virt-launcher/virtwrap/converter"
	"kubevirt.io/kubevirt/pkg/virt-launcher/virtwrap/converter/arch"
	"kubevirt.io/kubevirt/pkg/virt-launcher/virtwrap/device/hostdevice/gpu"
)

type call struct {
	VMI          *v1.VirtualMachineInstance
	CPUSet       []int
	Topology     *cmdv1.Topology
	Placeholders int
	RootPorts    int // of the third definition, 0 for none
}

type definition struct{ Given, Placed, Printed string }

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func convert(c *call) *api.Domain {
	gpus, err := gpu.CreateHostDevices(c.VMI.Spec.Domain.Devices.GPUs)
	check(err)
	given := newContext()
	given.Architecture = arch.NewConverter("amd64")
	given.VirtualMachine = c.VMI
	given.AllowEmulation = true
	given.CPUSet = c.CPUSet
	given.Topology = c.Topology
	given.GPUHostDevices = gpus
	given.SMBios = &cmdv1.SMBios{}
	domain := &api.Domain{}
	check(converter.Convert_v1_VirtualMachineInstance_To_api_Domain(c.VMI, domain, given))
	api.NewDefaulter("amd64").SetObjectDefaults_Domain(domain)
	domain.Spec.Type = "qemu"
	for i := range domain.Spec.Devices.Interfaces { // as virt-launcher does with the pod's network
		one := &domain.Spec.Devices.Interfaces[i]
		one.Type, one.Target = "ethernet", &api.InterfaceTarget{Device: fmt.Sprintf("tap%d", i), Managed: "no"}
	}
	return domain
}

func virsh(arguments ...string) string {
	command := exec.Command("virsh", append([]string{"-c", os.Getenv("LIBVIRT_URI")}, arguments...)...)
	command.Stderr = os.Stderr
	printed, err := command.Output()
	check(err)
	return string(printed)
}

// define does as SetDomainSpecStrWithHooks: the specification becomes what the hook gave, as far as
// KubeVirt's types hold it.
func define(manager hooks.Manager, vmi *v1.VirtualMachineInstance, spec *api.DomainSpec) definition {
	given, err := xml.Marshal(spec)
	check(err)
	placed, err := manager.OnDefineDomain(spec, vmi)
	check(err)
	var read api.DomainSpec
	check(xml.Unmarshal([]byte(placed), &read))
	read.DeepCopyInto(spec)
	file, err := os.CreateTemp("", "chain-*.xml")
	check(err)
	defer os.Remove(file.Name())
	_, err = file.WriteString(placed)
	check(err)
	virsh("define", file.Name())
	return definition{string(given), placed, virsh("dumpxml", "--inactive", spec.Name)}
}

func main() {
	var c call
	check(json.NewDecoder(os.Stdin).Decode(&c))
	manager := hooks.GetManager()
	check(manager.Collect(1, 20*time.Second))
	spec := &convert(&c).Spec
	var done []definition
	if c.Placeholders > 0 {
		kept := spec.DeepCopy()
		for i := 0; i < c.Placeholders; i++ {
			device := &api.InterfaceTarget{Device: fmt.Sprintf("placeholder-%d", i), Managed: "no"}
			kept.Devices.Interfaces = append(kept.Devices.Interfaces, api.Interface{
				Type: "ethernet", Model: &api.Model{Type: "virtio-non-transitional"}, Target: device,
			})
		}
		done = append(done, define(manager, c.VMI, kept))
		var printed api.DomainSpec
		check(xml.Unmarshal([]byte(done[0].Printed), &printed))
		printed.Devices.Interfaces = spec.Devices.Interfaces
		spec.Devices = printed.Devices
	}
	done = append(done, define(manager, c.VMI, spec))
	if c.RootPorts > 0 {
		last := 0
		for _, one := range spec.Devices.Controllers {
			if index, err := strconv.Atoi(one.Index); err == nil && one.Type == "pci" && index > last {
				last = index
			}
		}
		for i := 1; i <= c.RootPorts; i++ {
			port := api.Controller{Type: "pci", Index: strconv.Itoa(last + i), Model: "pcie-root-port"}
			spec.Devices.Controllers = append(spec.Devices.Controllers, port)
		}
		done = append(done, define(manager, c.VMI, spec))
	}
	check(json.NewEncoder(os.Stdout).Encode(done))
}
