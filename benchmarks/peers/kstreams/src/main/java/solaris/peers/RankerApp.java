package solaris.peers;

import ai.onnxruntime.OrtException;
import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.StreamReadFeature;
import com.fasterxml.jackson.core.StreamWriteFeature;
import java.io.IOException;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.clients.producer.ProducerConfig;
import org.apache.kafka.common.serialization.Serde;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.utils.Bytes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.Topology;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.KTable;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.processor.api.Processor;
import org.apache.kafka.streams.processor.api.ProcessorContext;
import org.apache.kafka.streams.processor.api.Record;
import org.apache.kafka.streams.state.KeyValueStore;
import org.apache.kafka.streams.state.Stores;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * The ranker's join in Kafka Streams: {@code java solaris.peers.RankerApp CONFIG.json}.
 *
 * <p>embeddings, grouped by user, aggregate into one value a user in a persistent (RocksDB) store: the chunk list, less
 * what is past TTL and window. impressions join that table by key; the joiner looks the ads up in the chunks, runs the
 * models and writes the answer. One point read serves an impression; a key for each user and item would be a scan of a
 * hundred. The catalogue is a global store, decoded once per item.
 */
public final class RankerApp {
    private static final Logger LOG = LoggerFactory.getLogger(RankerApp.class);

    private RankerApp() {}

    public static void main(String[] args) throws Exception {
        Config config = Config.read(args[0]);
        JsonFactory json = JsonFactory.builder()
                .enable(StreamReadFeature.USE_FAST_DOUBLE_PARSER)
                .enable(StreamWriteFeature.USE_FAST_DOUBLE_WRITER)
                .build();
        Properties properties = properties(config);
        CountDownLatch ended = new CountDownLatch(1);
        boolean[] failed = {false};
        try (Ranker ranker = new Ranker(config, json, new Catalogue(config, json));
                KafkaStreams streams = new KafkaStreams(topology(config, ranker), properties)) {
            streams.setUncaughtExceptionHandler(e -> {
                LOG.error("the application ends", e);
                failed[0] = true;
                ended.countDown();
                return StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
            });
            Runtime.getRuntime().addShutdownHook(new Thread(ended::countDown));
            streams.start();
            ended.await();
        }
        if (failed[0]) {
            Runtime.getRuntime().halt(1);
        }
    }

    static Topology topology(Config config, Ranker ranker) {
        Serde<byte[]> raw = Serdes.ByteArray();
        StreamsBuilder builder = new StreamsBuilder();
        builder.addGlobalStore(
                Stores.keyValueStoreBuilder(Stores.inMemoryKeyValueStore("items"), raw, raw).withLoggingDisabled(),
                config.items(), Consumed.with(raw, raw), () -> new ItemReader(ranker.catalogue()));
        long keepMs = Math.max(config.ttlMs(), config.windowMs());
        KTable<byte[], byte[]> users = builder.stream(config.embeddings(), Consumed.with(raw, raw))
                .filter((user, chunk) -> user != null && Chunks.valid(chunk))
                .groupByKey(Grouped.with(raw, raw))
                .aggregate(
                        () -> new byte[0],
                        (user, chunk, chunks) -> Chunks.add(chunks, chunk, keepMs),
                        Materialized.<byte[], byte[], KeyValueStore<Bytes, byte[]>>as("chunks")
                                .withKeySerde(raw)
                                .withValueSerde(raw)
                                .withCachingEnabled());
        builder.stream(config.impressions(), Consumed.with(raw, raw))
                .leftJoin(users, (impression, chunks) -> rank(ranker, impression, chunks))
                .filter((user, answer) -> answer != null)
                .to(config.rankedAds(), Produced.with(raw, raw));
        return builder.build();
    }

    /** One record, one run of each model: the DSL and the Processor API both hand on record by record. */
    private static byte[] rank(Ranker ranker, byte[] impression, byte[] chunks) {
        try {
            return ranker.rank(impression, chunks);
        } catch (IOException e) {
            LOG.warn("left out: {}", e.toString());
            return null;
        } catch (OrtException e) {
            throw new IllegalStateException(e);
        }
    }

    private static Properties properties(Config config) {
        Properties p = new Properties();
        p.put(StreamsConfig.APPLICATION_ID_CONFIG, config.applicationId());
        p.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, config.bootstrap());
        p.put(StreamsConfig.STATE_DIR_CONFIG, config.stateDir());
        p.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, config.guarantee()); // commits every 100 ms with exactly_once_v2
        p.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, 1);
        p.put(StreamsConfig.REPLICATION_FACTOR_CONFIG, 1);
        p.put(StreamsConfig.TOPOLOGY_OPTIMIZATION_CONFIG, StreamsConfig.OPTIMIZE);
        p.put(StreamsConfig.STATESTORE_CACHE_MAX_BYTES_CONFIG, 256L << 20);
        p.put(StreamsConfig.consumerPrefix(ConsumerConfig.AUTO_OFFSET_RESET_CONFIG), "earliest");
        p.put(StreamsConfig.consumerPrefix(ConsumerConfig.MAX_POLL_RECORDS_CONFIG), 1000);
        p.put(StreamsConfig.producerPrefix(ProducerConfig.LINGER_MS_CONFIG), 5);
        p.put(StreamsConfig.producerPrefix(ProducerConfig.COMPRESSION_TYPE_CONFIG), "lz4");
        p.put(StreamsConfig.producerPrefix(ProducerConfig.BATCH_SIZE_CONFIG), 256 << 10);
        return p;
    }

    /** Keeps the catalogue's decoded form beside the global store. */
    private static final class ItemReader implements Processor<byte[], byte[], Void, Void> {
        private final Catalogue catalogue;
        private KeyValueStore<byte[], byte[]> store;

        ItemReader(Catalogue catalogue) {
            this.catalogue = catalogue;
        }

        @Override
        public void init(ProcessorContext<Void, Void> context) {
            store = context.getStateStore("items");
            try (var all = store.all()) { // what was restored at start without passing here
                all.forEachRemaining(entry -> catalogue.update(entry.value));
            }
        }

        @Override
        public void process(Record<byte[], byte[]> item) {
            if (item.key() != null) {
                store.put(item.key(), item.value());
                if (item.value() != null) {
                    catalogue.update(item.value());
                }
            }
        }
    }
}
