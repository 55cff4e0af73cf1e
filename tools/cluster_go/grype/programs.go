//go:build tools

// Package grype names the program that is built from another module, so that go.mod keeps its requirements.
package grype

import _ "github.com/anchore/grype/cmd/grype"
