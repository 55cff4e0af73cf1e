//go:build tools

// Package cosign names the program that is built from another module, so that go.mod keeps its requirements.
package cosign

import _ "github.com/sigstore/cosign/v3/cmd/cosign"
