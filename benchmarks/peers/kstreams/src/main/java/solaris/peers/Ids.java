package solaris.peers;

import com.dynatrace.hash4j.hashing.Hashing;
import com.dynatrace.hash4j.hashing.Hasher64;
import java.nio.charset.StandardCharsets;

/** Ids as unsigned 64-bit xxh3 hashes, as everywhere in the pipeline; 0 is kept for "no id". */
final class Ids {
    private static final Hasher64 XXH3 = Hashing.xxh3_64();

    private Ids() {}

    static long hash(byte[] utf8) {
        long h = XXH3.hashBytesToLong(utf8);
        return h == 0 ? 1 : h;
    }

    static long hash(String id) {
        return hash(id.getBytes(StandardCharsets.UTF_8));
    }

    static long bucket(long hash, int buckets) {
        return 1 + Long.remainderUnsigned(hash, buckets);
    }
}
