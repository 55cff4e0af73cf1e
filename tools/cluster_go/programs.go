//go:build tools

// Package clustergo names the programs that are built from other modules, so that go.mod keeps their requirements.
package clustergo

import _ "helm.sh/helm/v4/cmd/helm"
