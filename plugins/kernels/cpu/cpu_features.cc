#include "cpu_features.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "status.h"

namespace enginebay {
namespace {

constexpr const char* kNames[] = {"baseline", "avx2", "avx512", "avx512vnni", "amx"};

// State components the system saves on a context switch (Intel SDM vol. 1, 13.3).
uint64_t saved_state() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_OSXSAVE)) return 0;
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// Linux grants AMX tile data per process, on request.
bool amx_permitted() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

CpuFeatures detect() {
  unsigned eax, ebx, ecx, edx, eax1 = 0, ecx1, edx1;
  CpuFeatures features{};
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return features;
  const bool fma_f16c = (ecx & bit_FMA) && (ecx & bit_F16C);
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return features;
  if (eax >= 1) __get_cpuid_count(7, 1, &eax1, &ebx, &ecx1, &edx1);
  __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx);
  const uint64_t state = saved_state();
  constexpr uint64_t kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;
  if (!fma_f16c || !(ebx & bit_AVX2) || (state & kYmm) != kYmm) return features;
  features.isa = Isa::kAvx2;
  constexpr unsigned kAvx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
  if ((ebx & kAvx512) != kAvx512 || (state & kZmm) != kZmm) return features;
  features.isa = Isa::kAvx512;
  if (!(ecx & bit_AVX512VNNI)) return features;
  features.isa = Isa::kAvx512Vnni;
  constexpr unsigned kAvx512Bf16 = 1u << 5;                        // leaf 7.1 eax
  constexpr unsigned kAmx = (1u << 22) | (1u << 24) | (1u << 25);  // leaf 7.0 edx: bf16, tile, int8
  features.avx512_bf16 = eax1 & kAvx512Bf16;
  if (features.avx512_bf16 && (edx & kAmx) == kAmx && (state & kTiles) == kTiles && amx_permitted()) {
    features.isa = Isa::kAmx;
  }
  return features;
}

struct Choice {
  CpuFeatures features;
  eb_status status = EB_OK;
  const char* has;  // the highest level of this processor
  char wish[32] = "";

  Choice() : features(detect()), has(kNames[static_cast<int>(features.isa)]) {
    const char* value = std::getenv("ENGINEBAY_ISA");
    if (value == nullptr || *value == '\0') return;
    std::strncpy(wish, value, sizeof wish - 1);
    features.forced = true;
    if (std::strcmp(value, "amx-emulated") == 0) {
      features.emulate_amx = true;
      status = features.isa >= Isa::kAvx2 ? EB_OK : EB_UNSUPPORTED;
      return;
    }
    for (int level = 0; level <= static_cast<int>(Isa::kAmx); ++level) {
      if (std::strcmp(value, kNames[level]) != 0) continue;
      if (level > static_cast<int>(features.isa)) {
        status = EB_UNSUPPORTED;
        return;
      }
      features.isa = static_cast<Isa>(level);
      features.avx512_bf16 &= features.isa >= Isa::kAvx512Vnni;
      return;
    }
    status = EB_INVALID_ARGUMENT;
  }
};

}  // namespace

eb_status cpu_features(const eb_context* context, CpuFeatures* features) {
  static const Choice choice;
  *features = choice.features;
  if (choice.status == EB_UNSUPPORTED) {
    return fail(context, EB_UNSUPPORTED, "ENGINEBAY_ISA=%s, but this processor goes up to %s", choice.wish,
                choice.has);
  }
  if (choice.status != EB_OK) {
    return fail(context, choice.status,
                "ENGINEBAY_ISA=%s is not one of baseline, avx2, avx512, avx512vnni, amx, amx-emulated; unset "
                "it or choose one",
                choice.wish);
  }
  return EB_OK;
}

}  // namespace enginebay
