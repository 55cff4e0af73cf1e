//go:build tools

// Package s3 holds the S3 server of the tests: the program is built from the module that go.mod names.
package s3

import _ "github.com/versity/versitygw/cmd/versitygw"
