// Command oracle asks the kubelet's own topology, CPU, memory and device managers whether they
// admit pods. It reads one case a line from standard input and writes one answer a line.
//
// A case is a machine, a kubelet's settings and pods that arrive one after the other. An answer has
// for each pod the kubelet's reason ("" when admitted) and for each container its CPUs and the NUMA
// nodes of its hint.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"os"

	cadvisor "github.com/google/cadvisor/info/v1"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/cm/cpumanager"
	cpustate "k8s.io/kubernetes/pkg/kubelet/cm/cpumanager/state"
	"k8s.io/kubernetes/pkg/kubelet/cm/cpumanager/topology"
	"k8s.io/kubernetes/pkg/kubelet/cm/memorymanager"
	memorystate "k8s.io/kubernetes/pkg/kubelet/cm/memorymanager/state"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
	"k8s.io/utils/cpuset"
)

type node struct {
	ID        int
	Memory    uint64
	Distances []uint64
	HugePages map[string]uint64 // page size in KiB -> pages
	Cores     []struct {
		Socket, Uncore int
		Threads        []int
	}
}

type kubelet struct {
	TopologyPolicy, Scope, CPUPolicy, MemoryPolicy string
	TopologyOptions, CPUOptions                    map[string]string
	ReservedCPUs                                   string
	ReservedCPUCount                               int
	ReservedMemory                                 map[int]map[v1.ResourceName]uint64
}

type testCase struct {
	Sockets int
	Nodes   []node
	Kubelet kubelet
	Devices map[string]map[string][]int // resource -> device -> nodes
	Pods    []*v1.Pod
}

type containerAnswer struct {
	CPUs  string `json:"cpus"`
	Nodes []int  `json:"nodes"`
}

type podAnswer struct {
	Reason     string            `json:"reason"`
	Message    string            `json:"message"`
	Containers []containerAnswer `json:"containers"`
}

var log = klog.Background()

// The managers behind the three hint providers, without the parts that talk to containers.
type cpuProvider struct {
	policy cpumanager.Policy
	state  cpustate.State
}

func (p *cpuProvider) GetTopologyHints(pod *v1.Pod, c *v1.Container) map[string][]topologymanager.TopologyHint {
	return p.policy.GetTopologyHints(log, p.state, pod, c)
}

func (p *cpuProvider) GetPodTopologyHints(pod *v1.Pod) map[string][]topologymanager.TopologyHint {
	return p.policy.GetPodTopologyHints(log, p.state, pod)
}

func (p *cpuProvider) AllocatePod(pod *v1.Pod) error {
	return p.policy.AllocatePod(log, p.state, pod)
}

func (p *cpuProvider) Allocate(pod *v1.Pod, c *v1.Container) error {
	return p.policy.Allocate(log, p.state, pod, c)
}

type memoryProvider struct {
	policy memorymanager.Policy
	state  memorystate.State
}

func (p *memoryProvider) GetTopologyHints(pod *v1.Pod, c *v1.Container) map[string][]topologymanager.TopologyHint {
	return p.policy.GetTopologyHints(log, p.state, pod, c)
}

func (p *memoryProvider) GetPodTopologyHints(pod *v1.Pod) map[string][]topologymanager.TopologyHint {
	return p.policy.GetPodTopologyHints(log, p.state, pod)
}

func (p *memoryProvider) AllocatePod(pod *v1.Pod) error {
	return p.policy.AllocatePod(log, p.state, pod)
}

func (p *memoryProvider) Allocate(pod *v1.Pod, c *v1.Container) error {
	return p.policy.Allocate(log, p.state, pod, c)
}

func machine(c *testCase) *cadvisor.MachineInfo {
	info := &cadvisor.MachineInfo{NumSockets: c.Sockets}
	for _, n := range c.Nodes {
		made := cadvisor.Node{Id: n.ID, Memory: n.Memory, Distances: n.Distances}
		for i, core := range n.Cores {
			info.NumCores += len(core.Threads)
			made.Cores = append(made.Cores, cadvisor.Core{
				Id: i, Threads: core.Threads, SocketID: core.Socket,
				UncoreCaches: []cadvisor.Cache{{Id: core.Uncore}},
			})
		}
		for size, pages := range n.HugePages {
			var kib uint64
			fmt.Sscan(size, &kib)
			made.HugePages = append(made.HugePages, cadvisor.HugePagesInfo{PageSize: kib, NumPages: pages})
		}
		info.Topology = append(info.Topology, made)
	}
	return info
}

// canonical spells quantities as the API server does, which the kubelet gets them from.
func canonical(pod *v1.Pod) {
	text, err := json.Marshal(pod)
	if err != nil {
		panic(err)
	}
	*pod = v1.Pod{}
	if err := json.Unmarshal(text, pod); err != nil {
		panic(err)
	}
}

func answer(c *testCase) ([]podAnswer, error) {
	info := machine(c)
	k := c.Kubelet
	manager, err := topologymanager.NewManager(info.Topology, k.TopologyPolicy, k.Scope, k.TopologyOptions)
	if err != nil {
		return nil, err
	}
	active := []*v1.Pod{}
	devices := newDeviceManager(info.Topology, manager, c.Devices, func() []*v1.Pod { return active })
	manager.AddHintProvider(log, devices)

	cpus := &cpuProvider{state: cpustate.NewMemoryState(log)}
	if k.CPUPolicy == "static" {
		found, err := topology.Discover(log, info)
		if err != nil {
			return nil, err
		}
		reserved, err := cpuset.Parse(k.ReservedCPUs)
		if err != nil {
			return nil, err
		}
		count := k.ReservedCPUCount
		if reserved.Size() > 0 {
			count = reserved.Size()
		}
		cpus.policy, err = cpumanager.NewStaticPolicy(log, found, count, reserved, manager, k.CPUOptions)
		if err != nil {
			return nil, err
		}
	} else if cpus.policy, err = cpumanager.NewNonePolicy(nil); err != nil {
		return nil, err
	}
	if err := cpus.policy.Start(log, cpus.state); err != nil {
		return nil, err
	}
	manager.AddHintProvider(log, cpus)

	memory := &memoryProvider{state: memorystate.NewMemoryState(log)}
	if k.MemoryPolicy == "Static" {
		memory.policy, err = memorymanager.NewPolicyStatic(log, info, k.ReservedMemory, manager)
		if err != nil {
			return nil, err
		}
	} else {
		memory.policy = memorymanager.NewPolicyNone(log)
	}
	if err := memory.policy.Start(log, memory.state); err != nil {
		return nil, err
	}
	manager.AddHintProvider(log, memory)

	answers := []podAnswer{}
	for i, pod := range c.Pods {
		canonical(pod)
		pod.UID = types.UID(fmt.Sprintf("pod-%d", i))
		active = append(active, pod)
		result := manager.Admit(&lifecycle.PodAdmitAttributes{Pod: pod})
		one := podAnswer{Reason: result.Reason, Message: result.Message, Containers: []containerAnswer{}}
		every := append(append([]v1.Container{}, pod.Spec.InitContainers...), pod.Spec.Containers...)
		for _, container := range every {
			if !result.Admit {
				cpus.policy.RemoveContainer(log, cpus.state, string(pod.UID), container.Name)
				memory.policy.RemoveContainer(log, memory.state, string(pod.UID), container.Name)
				continue
			}
			set, _ := cpus.state.GetCPUSet(string(pod.UID), container.Name)
			given := containerAnswer{CPUs: set.String(), Nodes: []int{}}
			if hint := manager.GetAffinity(string(pod.UID), container.Name); hint.NUMANodeAffinity != nil {
				given.Nodes = hint.NUMANodeAffinity.GetBits()
			}
			one.Containers = append(one.Containers, given)
		}
		if !result.Admit {
			active = active[:len(active)-1]
			devices.UpdateAllocatedDevices()
		}
		answers = append(answers, one)
	}
	return answers, nil
}

func main() {
	// The options that Kubernetes calls alpha.
	if err := utilfeature.DefaultMutableFeatureGate.Set("CPUManagerPolicyAlphaOptions=true"); err != nil {
		panic(err)
	}
	flags := flag.NewFlagSet("klog", flag.ExitOnError)
	klog.InitFlags(flags)
	_ = flags.Parse([]string{"-logtostderr=false", "-alsologtostderr=false", "-stderrthreshold=FATAL", "-v=0"})
	klog.SetOutput(discard{})
	input := bufio.NewScanner(os.Stdin)
	input.Buffer(make([]byte, 1<<20), 64<<20)
	output := bufio.NewWriter(os.Stdout)
	defer output.Flush()
	write := json.NewEncoder(output)
	for input.Scan() {
		var c testCase
		if err := json.Unmarshal(input.Bytes(), &c); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(2)
		}
		answers, err := answer(&c)
		if err != nil {
			_ = write.Encode(map[string]string{"error": err.Error()})
			continue
		}
		_ = write.Encode(answers)
	}
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }
