//go:build tools

// Package krew names the programs that are built from another module, so that go.mod keeps its requirements.
package krew

import (
	_ "sigs.k8s.io/krew/cmd/krew"
	_ "sigs.k8s.io/krew/cmd/validate-krew-manifest"
)
