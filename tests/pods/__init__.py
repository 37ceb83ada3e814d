"""Pods and the kubelet's answers to them."""
