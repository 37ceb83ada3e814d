//go:build !kubevirt1_6

package main

import "kubevirt.io/kubevirt/pkg/virt-launcher/virtwrap/converter/types"

func newContext() *types.ConverterContext {
	return &types.ConverterContext{HypervisorName: "kvm"}
}
