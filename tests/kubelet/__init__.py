"""The kubelet's own managers as an oracle for pods.admission: a Go program, cases and answers."""
