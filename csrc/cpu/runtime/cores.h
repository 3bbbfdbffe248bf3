#pragma once

namespace tw {

// Cores that this process may keep busy: those it is allowed to run on, or fewer where its control group's share of
// processor time is worth fewer. At least 1.
int usable_cores();

}  // namespace tw
