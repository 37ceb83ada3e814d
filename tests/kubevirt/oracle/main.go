// Command oracle asks KubeVirt's own admission whether it takes VMIs: the webhook that sets defaults,
// then the one that validates. It reads one case a line from standard input, {"config":
// KubeVirtConfiguration, "vmi": VirtualMachineInstance}, and writes the causes of each refusal as a
// list, [] where the VMI is admitted.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"

	admission "k8s.io/api/admission/v1"
	extensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"
	v1 "kubevirt.io/api/core/v1"
	"kubevirt.io/client-go/log"

	"kubevirt.io/kubevirt/pkg/virt-api/webhooks"
	"kubevirt.io/kubevirt/pkg/virt-api/webhooks/mutating-webhook/mutators"
	"kubevirt.io/kubevirt/pkg/virt-api/webhooks/validating-webhook/admitters"
	virtconfig "kubevirt.io/kubevirt/pkg/virt-config"
)

type testCase struct {
	Config v1.KubeVirtConfiguration
	VMI    json.RawMessage
}

func informer(object runtime.Object) cache.SharedIndexInformer {
	return cache.NewSharedIndexInformer(&cache.ListWatch{}, object, 0, cache.Indexers{})
}

func causes(c *testCase) (found []string, err error) {
	defer func() { // the API server refuses what its webhook does not answer
		if failure := recover(); failure != nil {
			found = []string{fmt.Sprint("panic: ", failure)}
		}
	}()
	cr := &v1.KubeVirt{
		ObjectMeta: metav1.ObjectMeta{Name: "kubevirt", Namespace: "kubevirt", ResourceVersion: "1"},
		Spec:       v1.KubeVirtSpec{Configuration: c.Config},
		Status:     v1.KubeVirtStatus{DefaultArchitecture: "amd64", Phase: "Deployed"},
	}
	crs := informer(&v1.KubeVirt{})
	if err := crs.GetStore().Add(cr); err != nil {
		return nil, err
	}
	config, err := virtconfig.NewClusterConfigWithCPUArch(
		informer(&extensions.CustomResourceDefinition{}), crs, "kubevirt", "amd64")
	if err != nil {
		return nil, err
	}
	var vmi v1.VirtualMachineInstance
	if err := json.Unmarshal(c.VMI, &vmi); err != nil {
		return nil, err
	}
	if err := mutators.ApplyNewVMIMutations(&vmi, config); err != nil {
		return []string{err.Error()}, nil
	}
	mutated, err := json.Marshal(&vmi)
	if err != nil {
		return nil, err
	}
	admitter := &admitters.VMICreateAdmitter{ClusterConfig: config}
	review := &admission.AdmissionReview{Request: &admission.AdmissionRequest{
		Resource: webhooks.VirtualMachineInstanceGroupVersionResource,
		Object:   runtime.RawExtension{Raw: mutated},
	}}
	answer := admitter.Admit(context.Background(), review)
	found = []string{}
	if answer.Allowed {
		return found, nil
	}
	if answer.Result.Details == nil {
		return append(found, answer.Result.Message), nil
	}
	for _, cause := range answer.Result.Details.Causes {
		found = append(found, cause.Message)
	}
	return found, nil
}

func main() {
	log.InitializeLogging("oracle")
	input := bufio.NewScanner(os.Stdin)
	input.Buffer(make([]byte, 1<<20), 64<<20)
	output := json.NewEncoder(os.Stdout)
	for input.Scan() {
		var c testCase
		err := json.Unmarshal(input.Bytes(), &c)
		found := []string{}
		if err == nil {
			found, err = causes(&c)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(2)
		}
		_ = output.Encode(found)
	}
}
