// Incus' own code reads instances: their keys, their devices, and the QEMU that it would start.
//
// taken.go is made next to it: functions of packages that need all of Incus' daemon; what they import
// is named here, too. The module has
// a path below Incus' own, so that it may import what is internal there. Reads a line of JSON for
// each instance, writes one with what was understood or why it was refused.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"gopkg.in/yaml.v2"

	"github.com/lxc/incus/v6/internal/instance"
	_ "github.com/lxc/incus/v6/internal/linux"
	deviceConfig "github.com/lxc/incus/v6/internal/server/device/config"
	_ "github.com/lxc/incus/v6/internal/server/device/pci"
	"github.com/lxc/incus/v6/internal/server/instance/drivers/cfg"
	"github.com/lxc/incus/v6/internal/server/instance/instancetype"
	_ "github.com/lxc/incus/v6/internal/server/resources"
	"github.com/lxc/incus/v6/internal/version"
	"github.com/lxc/incus/v6/shared/api"
)

// What the functions taken use of the types of their packages.

type qemu struct {
	architectureName string
	expandedConfig   map[string]string
	logger           quiet
}

type quiet struct{}

func (quiet) Warn(string) {}

func (*qemu) version() (*version.DottedVersion, error) { return version.NewDottedVersion("7.2") }
func (*qemu) architectureSupportsCPUHotplug() bool     { return true }

type hugepages struct{}

func (hugepages) HugepagesPath() (string, error) { return "/dev/hugepages", nil }

var localUtil hugepages

// Of devices, whose sections are not asked for here.
const qemuDeviceIDPrefix = "dev-"

type configReader struct{}

func (configReader) Type() instancetype.Type { return instancetype.VM }

type deviceCommon struct{ config deviceConfig.Device }
type gpuPhysical struct{ deviceCommon }
type pci struct{ deviceCommon }

var ErrUnsupportedDevType = fmt.Errorf("Unsupported device type")

type read struct {
	Refused string
	Memory  int64
	// Host CPUs by vCPU; empty where it floats.
	Pins     map[uint64]uint64
	Sockets  int
	Cores    int
	Threads  int
	Sections []cfg.Section
	Devices  map[string]string
}

func check(values map[string]string) error {
	for key, value := range values {
		checker, err := instance.ConfigKeyChecker(key, api.InstanceTypeVM)
		if err == nil {
			err = checker(value)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
	}
	return nil
}

func device(config deviceConfig.Device) (string, error) {
	common := deviceCommon{config}
	switch config["type"] {
	case "pci":
		one := pci{common}
		return config["address"], one.validateConfig(configReader{})
	case "gpu":
		if config["gputype"] != "" && config["gputype"] != "physical" {
			return "", fmt.Errorf("gputype %s", config["gputype"])
		}
		one := gpuPhysical{common}
		return config["pci"], one.validateConfig(configReader{})
	default:
		return "", nil
	}
}

func understand(text string) (found read, err error) {
	// As cmd/incus does for `incus create NAME < FILE`, with names as they are in a list of them.
	put := api.InstancesPost{}
	err = yaml.UnmarshalStrict([]byte(text), &put)
	if err != nil {
		return found, err
	}
	err = check(put.Config)
	if err != nil {
		return found, err
	}
	found.Devices = map[string]string{}
	for name, config := range put.Devices {
		address, err := device(config)
		if err != nil {
			return found, fmt.Errorf("%s: %w", name, err)
		}
		if address != "" {
			found.Devices[name] = address
		}
	}
	d := &qemu{architectureName: "x86_64", expandedConfig: put.Config}
	found.Memory, err = ParseMemoryStr(put.Config["limits.memory"])
	if err != nil {
		return found, err
	}
	cpus, err := d.cpuTopology(put.Config["limits.cpu"])
	if err != nil {
		return found, err
	}
	options, err := d.getCPUOpts(cpus, found.Memory)
	if err != nil {
		return found, err
	}
	found.Pins, found.Sockets, found.Cores, found.Threads = cpus.vcpus, cpus.sockets, cpus.cores, cpus.threads
	sections := qemuCPU(options, cpus.vcpus != nil)
	found.Sections, err = qemuRawCfgOverride(sections, put.Config["raw.qemu.conf"])
	return found, err
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<26)
	answers := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		// The host is the tree in the folder: the sources read sys/devices/system/cpu in it.
		asked := struct{ Folder, Text string }{}
		err := json.Unmarshal(lines.Bytes(), &asked)
		if err == nil {
			err = os.Chdir(asked.Folder)
		}
		if err != nil {
			panic(err)
		}
		found, err := understand(strings.TrimPrefix(asked.Text, "\ufeff"))
		if err != nil {
			found.Refused = err.Error()
		}
		if err := answers.Encode(found); err != nil {
			panic(err)
		}
	}
}
