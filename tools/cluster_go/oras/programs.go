//go:build tools

// Package oras names the program that is built from another module, so that go.mod keeps its requirements.
package oras

import _ "oras.land/oras/cmd/oras"
