//go:build kubevirt1_6

package main

import "kubevirt.io/kubevirt/pkg/virt-launcher/virtwrap/converter"

func newContext() *converter.ConverterContext { return &converter.ConverterContext{} }
