// Preloaded: "is there a driver?" is asked by looking for its device file, and no such file is made for everybody here.
#include <cstring>
#include <dlfcn.h>
#include <sys/stat.h>

template <typename Function> static Function next(const char* name) { return (Function)dlsym(RTLD_NEXT, name); }
static const char* stand_in(const char* path) { return path && !strcmp(path, "/dev/nvidiactl") ? "/dev/null" : path; }

extern "C" int stat(const char* path, struct stat* result) {
    static auto real = next<int (*)(const char*, struct stat*)>("stat");
    return real(stand_in(path), result);
}
extern "C" int stat64(const char* path, struct stat64* result) {
    static auto real = next<int (*)(const char*, struct stat64*)>("stat64");
    return real(stand_in(path), result);
}
