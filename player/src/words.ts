/** Steps, cells, amounts and faults in words. */
import { countOf, type Film, type Message } from "./film";
import type { Timing } from "./timing";

const MOST = 8; // messages of a step that are named one by one

export function seconds(value: number): string {
  if (!Number.isFinite(value)) return "never";
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["us", 1e-6]] as const) {
    if (value >= size) return `${Number((value / size).toPrecision(3))} ${unit}`;
  }
  return value === 0 ? "0 us" : `${Number((value * 1e9).toPrecision(3))} ns`;
}

export function bytes(value: number): string {
  let size = value;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (size < 1024 || unit === "GiB") return `${Number(size.toPrecision(3))} ${unit}`;
    size /= 1024;
  }
  return "";
}

export function plural(count: number, noun: string): string {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

/** A step as a sentence for each message: what a person hears who does not see the picture. */
export function stepInWords(film: Film, step: number, timing: Timing): string {
  const { failure } = film.scene;
  if (step >= film.numSteps) {
    if (failure) return `The proof fails: ${failure.words.split("\n")[0] ?? ""}`;
    return `Done, after ${plural(film.numSteps, "step")}. Every rank has what it was promised.`;
  }
  if (film.scene.worldSize === 1) return "One rank has nothing to send.";
  const messages = film.steps[step]!;
  const sent = messages.filter((_, index) => Number.isFinite(timing.begin[step]![index]!));
  const missing = messages.length - sent.length;
  const count = missing > 0 ? `${sent.length} of ${plural(messages.length, "message")}` : plural(messages.length, "message");
  const head = `Step ${step}, of 0 to ${film.numSteps - 1}: ${count}.`;
  const rest = sent.length > MOST ? ` And ${sent.length - MOST} more messages.` : "";
  const never = missing > 0 ? ` The other${missing > 1 ? "s" : ""} will never arrive.` : "";
  return [head, ...sent.slice(0, MOST).map(messageInWords)].join(" ") + rest + never;
}

export function messageInWords({ source, target, chunks, numChunks, isReduced }: Message): string {
  const what = numChunks === 0 ? "nothing" : `chunk${numChunks === 1 ? "" : "s"} ${chunks}`;
  return `Rank ${source} sends ${what} to rank ${target}${isReduced ? ", which adds it" : ""}.`;
}

/** What a rank has of a chunk, from whom, and in which order it was added. */
export function cellInWords(film: Film, rank: number, chunk: number, after: number): string {
  const { complete, orders, sets } = film.scene;
  const set = film.held(rank, chunk, after);
  if (set < 0) return `Rank ${rank} has nothing of chunk ${chunk}.`;
  const count = countOf(film.sets[set]!);
  if (complete === 1) return `Rank ${rank} has chunk ${chunk} of rank ${sets[set]}.`;
  const whose = `${count === 1 ? "rank" : "ranks"} ${sets[set]}`;
  const order = count === complete ? orders[String(chunk)] : undefined;
  const how = order === undefined ? "" : ` Order of summation: ${order}.`;
  return `Rank ${rank} has of chunk ${chunk} the contributions of ${whose}: ${count} of ${complete}.${how}`;
}

/** What a dead or a slow rank does to the others. */
export function troubleInWords(film: Film, timing: Timing, slow: number, dead: number): string {
  const words = [];
  if (slow >= 0) words.push(`Rank ${slow} takes four times as long for everything.`);
  if (dead >= 0) {
    const waiting = (timing.ends.at(-1) ?? [])
      .map((end, rank) => (Number.isFinite(end) || rank === dead ? -1 : rank))
      .filter((rank) => rank >= 0);
    const others =
      waiting.length === 0
        ? "Nobody waits for it."
        : `${waiting.length === 1 ? "Rank" : "Ranks"} ${waiting.join(", ")} would wait for ever, for it ` +
          "or for each other. The library ends their waits with a PeerLostError that names it.";
    words.push(`Rank ${dead} has ended. ${others}`);
    if (film.scene.failure) words.push("The schedule is played as far as its own fault only.");
  }
  if (film.scene.failure) words.push(film.scene.failure.words);
  return words.join("\n");
}
