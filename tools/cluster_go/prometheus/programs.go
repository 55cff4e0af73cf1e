//go:build tools

// Package prometheus holds the monitoring programs of the tests, which are built from the module that go.mod names.
package prometheus

import (
	_ "github.com/prometheus/prometheus/cmd/prometheus"
	_ "github.com/prometheus/prometheus/cmd/promtool"
)
