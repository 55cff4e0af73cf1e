//go:build tools

// Package helm3 names the program that is built from another module, so that go.mod keeps its requirements.
package helm3

import _ "helm.sh/helm/v3/cmd/helm"
