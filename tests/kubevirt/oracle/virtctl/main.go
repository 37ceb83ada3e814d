// Command virtctl is the part of KubeVirt's virtctl that printed lines need, and prints the CRDs of
// KubeVirt's operator: virtctl crds.
package main

import (
	"context"
	"encoding/json"
	"os"

	"github.com/spf13/cobra"
	extensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"kubevirt.io/client-go/kubecli"

	"kubevirt.io/kubevirt/pkg/virt-operator/resource/generate/components"
	"kubevirt.io/kubevirt/pkg/virtctl/clientconfig"
	"kubevirt.io/kubevirt/pkg/virtctl/vm"
)

func printCrds(*cobra.Command, []string) error {
	for _, create := range []func() (*extensions.CustomResourceDefinition, error){
		components.NewKubeVirtCrd, components.NewVirtualMachineCrd, components.NewVirtualMachineInstanceCrd,
	} {
		crd, err := create()
		if err != nil {
			return err
		}
		if err := json.NewEncoder(os.Stdout).Encode(crd); err != nil {
			return err
		}
	}
	return nil
}

func main() {
	root := &cobra.Command{Use: "virtctl", SilenceUsage: true}
	config := kubecli.DefaultClientConfig(root.PersistentFlags())
	root.SetContext(clientconfig.NewContext(context.Background(), config))
	root.AddCommand(vm.NewRestartCommand(), &cobra.Command{Use: "crds", RunE: printCrds})
	if root.Execute() != nil {
		os.Exit(1)
	}
}
