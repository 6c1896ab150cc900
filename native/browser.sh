#!/usr/bin/env bash
# Gets Chromium and its driver for the tests of the page: Debian's packages, where they may be installed.
# Elsewhere it says so and succeeds; the tests then say loudly that they were skipped.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=native/lib.sh
. "$here/lib.sh"

if command -v chromedriver >/dev/null 2>&1 && { command -v chromium || command -v google-chrome; } >/dev/null 2>&1; then
  exit 0
fi
installed() {
  command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ] && (install_packages chromium chromium-driver)
}
if ! installed; then
  say "no Chromium with chromedriver here: the tests of the page will be skipped" \
    "(on Debian: sudo apt-get install -y chromium chromium-driver)"
fi
