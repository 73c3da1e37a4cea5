/* A planted program: it waits where it is planted, and leaves a marker where anybody else executes it. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int argc, char **argv) {
    char path[4096];
    if (getenv("PLANTED_AS") != NULL) { /* in a chroot, where nothing else can give it its name */
        argv[0] = getenv("PLANTED_AS");
        unsetenv("PLANTED_AS");
        execv("/evil", argv);
        return 1;
    }
    if (getenv("PLANTED") != NULL)
        for (;;)
            pause();
    snprintf(path, sizeof path, "%s/marker-%d", MARKERS, (int)getpid());
    FILE *marker = fopen(path, "w");
    if (marker != NULL) {
        for (int i = 0; i < argc; i++)
            fprintf(marker, "%s ", argv[i]);
        fclose(marker);
    }
    printf("containerd github.com/containerd/containerd 1.7.20\n");
    return 0;
}
