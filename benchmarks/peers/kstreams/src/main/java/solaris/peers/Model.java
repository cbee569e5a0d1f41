package solaris.peers;

import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.LongBuffer;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.Map;
import java.util.Set;

/**
 * The bundle's graphs on ONNX Runtime, one thread. Inputs and outputs are direct buffers that stay: tensors over them
 * are made once for each number of rows, and the base logit that vm writes is what vm_plus reads.
 */
final class Model implements AutoCloseable {
    private final OrtEnvironment ort = OrtEnvironment.getEnvironment();
    private final OrtSession vm;
    private final OrtSession vmPlus;
    private final OrtSession fmItem;
    private final Config config;
    private final Map<Integer, Rows> byRows = new HashMap<>();

    /** Buffers and tensors of one number of pairs; fill the buffers from index 0, then {@link #score}. */
    final class Rows {
        final LongBuffer userBucket = longs(1);
        final FloatBuffer request;
        final LongBuffer itemBucket;
        final FloatBuffer itemCode;
        final FloatBuffer counters;
        final FloatBuffer itemFeatures;
        final FloatBuffer slots;
        final FloatBuffer base;
        final FloatBuffer plus;
        private final Map<String, OnnxTensor> vmInputs = new HashMap<>();
        private final Map<String, OnnxTensor> plusInputs = new HashMap<>();
        private final Map<String, OnnxTensor> vmOutputs = new HashMap<>();
        private final Map<String, OnnxTensor> plusOutputs = new HashMap<>();

        Rows(int n, int slotWidth) throws OrtException {
            int c = config.itemFeatures().size(), r = config.requestFeatures().size();
            request = floats(r);
            itemBucket = longs(n);
            itemCode = floats(n * Catalogue.CODE);
            counters = floats(n * Ranker.COUNTERS);
            itemFeatures = floats(n * c);
            slots = floats(n * slotWidth);
            base = floats(n);
            plus = floats(n);
            OnnxTensor counted = tensor(counters, n, Ranker.COUNTERS), features = tensor(itemFeatures, n, c);
            OnnxTensor logit = tensor(base, n);
            vmInputs.put("row", OnnxTensor.createTensor(ort, longs(n), new long[] {n})); // one request: all zeros
            vmInputs.put("user_bucket", OnnxTensor.createTensor(ort, userBucket, new long[] {1}));
            vmInputs.put("item_bucket", OnnxTensor.createTensor(ort, itemBucket, new long[] {n}));
            vmInputs.put("item_code", tensor(itemCode, n, Catalogue.CODE));
            vmInputs.put("counters", counted);
            vmInputs.put("item_features", features);
            vmInputs.put("request_features", tensor(request, 1, r));
            vmOutputs.put("logit", logit);
            plusInputs.put("base_logit", logit);
            plusInputs.put("slots", tensor(slots, n, slotWidth));
            plusInputs.put("counters", counted);
            plusInputs.put("item_features", features);
            plusOutputs.put("logit", tensor(plus, n));
        }

        /** Fills {@code base} and, with {@code slotted}, {@code plus}. */
        void score(boolean slotted) throws OrtException {
            vm.run(vmInputs, Set.of(), vmOutputs).close();
            if (slotted) {
                vmPlus.run(plusInputs, Set.of(), plusOutputs).close();
            }
        }
    }

    Model(Config config) throws OrtException {
        this.config = config;
        OrtSession.SessionOptions options = new OrtSession.SessionOptions();
        options.setIntraOpNumThreads(1);
        options.setInterOpNumThreads(1);
        options.setExecutionMode(OrtSession.SessionOptions.ExecutionMode.SEQUENTIAL);
        options.setOptimizationLevel(OrtSession.SessionOptions.OptLevel.ALL_OPT);
        options.addConfigEntry("session.intra_op.allow_spinning", "0");
        vm = session("vm", options);
        vmPlus = session("vm_plus", options);
        fmItem = session("fm_item", options);
    }

    Rows rows(int n, int slotWidth) throws OrtException {
        Rows rows = byRows.get(n);
        if (rows == null) {
            if (byRows.size() >= 64) { // tensors of a number of rows not seen lately are made again
                byRows.clear();
            }
            rows = new Rows(n, slotWidth);
            byRows.put(n, rows);
        }
        return rows;
    }

    float[] itemVector(Catalogue.Item item) throws OrtException {
        int c = config.itemFeatures().size();
        try (OnnxTensor code = tensor(floats(Catalogue.CODE).put(0, item.code), 1, Catalogue.CODE);
                OnnxTensor features = tensor(floats(c).put(0, item.features), 1, c);
                OrtSession.Result out =
                        fmItem.run(Map.of("item_code", code, "item_features", features), Set.of("vector"))) {
            float[] vector = new float[config.itemDim()];
            ((OnnxTensor) out.get(0)).getFloatBuffer().get(vector);
            return vector;
        }
    }

    @Override
    public void close() throws OrtException {
        vm.close();
        vmPlus.close();
        fmItem.close();
    }

    private OrtSession session(String graph, OrtSession.SessionOptions options) throws OrtException {
        return ort.createSession(Path.of(config.bundle(), graph + ".onnx").toString(), options);
    }

    private OnnxTensor tensor(FloatBuffer values, long... shape) throws OrtException {
        return OnnxTensor.createTensor(ort, values, shape);
    }

    private static FloatBuffer floats(int n) {
        return ByteBuffer.allocateDirect(4 * Math.max(n, 1)).order(ByteOrder.nativeOrder()).asFloatBuffer();
    }

    private static LongBuffer longs(int n) {
        return ByteBuffer.allocateDirect(8 * Math.max(n, 1)).order(ByteOrder.nativeOrder()).asLongBuffer();
    }
}
