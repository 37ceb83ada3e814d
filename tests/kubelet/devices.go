package main

import (
	"context"
	"reflect"
	"sort"
	"unsafe"

	cadvisor "github.com/google/cadvisor/info/v1"
	"google.golang.org/grpc"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	plugins "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/checkpointmanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/config"
)

// newDeviceManager is the kubelet's device manager with these devices (resource -> device -> NUMA
// nodes). Its own constructor makes a folder in /var/lib/kubelet, so its fields are set by hand.
func newDeviceManager(nodes []cadvisor.Node, store topologymanager.Store, devices map[string]map[string][]int, active func() []*v1.Pod) *devicemanager.ManagerImpl {
	manager := &devicemanager.ManagerImpl{}
	fields := reflect.ValueOf(manager).Elem()
	for i := range fields.NumField() {
		if field := settable(fields.Field(i)); field.Kind() == reflect.Map {
			field.Set(reflect.MakeMap(field.Type()))
		}
	}
	ids := []int{}
	for _, node := range nodes {
		ids = append(ids, node.Id)
	}
	set := func(name string, value any) { settable(fields.FieldByName(name)).Set(reflect.ValueOf(value)) }
	set("numaNodes", ids)
	set("topologyAffinityStore", store)
	set("activePods", devicemanager.ActivePodsFunc(active))
	set("sourcesReady", config.NewSourcesReady(func(sets.Set[string]) bool { return true }))
	set("checkpointManager", noCheckpoint{})
	pods := settable(fields.FieldByName("podDevices"))
	pods.Set(reflect.New(pods.Type().Elem()))
	held := settable(pods.Elem().FieldByName("devs"))
	held.Set(reflect.MakeMap(held.Type()))
	for resource, named := range devices {
		listed := []*plugins.Device{}
		for id, on := range named {
			device := &plugins.Device{ID: id, Health: plugins.Healthy}
			if len(on) > 0 {
				device.Topology = &plugins.TopologyInfo{}
				for _, node := range on {
					device.Topology.Nodes = append(device.Topology.Nodes, &plugins.NUMANode{ID: int64(node)})
				}
			}
			listed = append(listed, device)
		}
		if err := manager.PluginConnected(context.Background(), resource, plugin{resource}); err != nil {
			panic(err)
		}
		manager.PluginListAndWatchReceiver(log, resource, &plugins.ListAndWatchResponse{Devices: listed})
	}
	return manager
}

func settable(field reflect.Value) reflect.Value {
	return reflect.NewAt(field.Type(), unsafe.Pointer(field.UnsafeAddr())).Elem()
}

// noCheckpoint keeps nothing on disk.
type noCheckpoint struct{}

func (noCheckpoint) CreateCheckpoint(string, checkpointmanager.Checkpoint) error { return nil }
func (noCheckpoint) GetCheckpoint(string, checkpointmanager.Checkpoint) error    { return nil }
func (noCheckpoint) RemoveCheckpoint(string) error                               { return nil }
func (noCheckpoint) ListCheckpoints() ([]string, error)                          { return nil, nil }

// plugin is a device plugin that prefers the devices of the lowest names, so that the manager's
// choice does not depend on the order of a map.
type plugin struct{ resource string }

func (p plugin) API() plugins.DevicePluginClient { return api{} }
func (p plugin) Resource() string                { return p.resource }
func (p plugin) SocketPath() string              { return "" }

type api struct{}

func (api) GetDevicePluginOptions(context.Context, *plugins.Empty, ...grpc.CallOption) (*plugins.DevicePluginOptions, error) {
	return &plugins.DevicePluginOptions{GetPreferredAllocationAvailable: true}, nil
}

func (api) ListAndWatch(context.Context, *plugins.Empty, ...grpc.CallOption) (grpc.ServerStreamingClient[plugins.ListAndWatchResponse], error) {
	return nil, nil
}

func (api) GetPreferredAllocation(_ context.Context, asked *plugins.PreferredAllocationRequest, _ ...grpc.CallOption) (*plugins.PreferredAllocationResponse, error) {
	answer := &plugins.PreferredAllocationResponse{}
	for _, one := range asked.ContainerRequests {
		chosen := sets.New(one.MustIncludeDeviceIDs...)
		sort.Strings(one.AvailableDeviceIDs)
		for _, id := range one.AvailableDeviceIDs {
			if chosen.Len() < int(one.AllocationSize) {
				chosen.Insert(id)
			}
		}
		answer.ContainerResponses = append(answer.ContainerResponses,
			&plugins.ContainerPreferredAllocationResponse{DeviceIDs: chosen.UnsortedList()})
	}
	return answer, nil
}

func (api) Allocate(_ context.Context, asked *plugins.AllocateRequest, _ ...grpc.CallOption) (*plugins.AllocateResponse, error) {
	answer := &plugins.AllocateResponse{}
	for range asked.ContainerRequests {
		answer.ContainerResponses = append(answer.ContainerResponses, &plugins.ContainerAllocateResponse{})
	}
	return answer, nil
}

func (api) PreStartContainer(context.Context, *plugins.PreStartContainerRequest, ...grpc.CallOption) (*plugins.PreStartContainerResponse, error) {
	return &plugins.PreStartContainerResponse{}, nil
}
