#!/bin/sh
# A compiler launcher for FP4BF16_WERROR: runs the command that it is given, and fails where ptxas reports that it
# serialised wgmma or ignored setmaxnreg. It says so in "info" lines, which neither -Werror=all-warnings nor
# -Xptxas=-Werror turns into errors:
#   C7508, C7509            setmaxnreg is ignored
#   C7510 to C7519          wgmma is serialised, or fences and waits were put in
log=$("$@" 2>&1)
status=$?
[ -z "$log" ] || printf '%s\n' "$log" >&2
if printf '%s' "$log" | grep -Eq '\(C75(08|09|1[0-9])\)'; then
  echo "error: ptxas serialised wgmma or ignored setmaxnreg (see above)" >&2
  exit 1
fi
exit $status
