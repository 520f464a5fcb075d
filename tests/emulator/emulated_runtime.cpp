// What every kernel calls, compiled once.
#include "emulator.h"
