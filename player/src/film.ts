/** A schedule, step by step: its messages, and what each rank holds after each step. */
import type { SceneData } from "./data";

export interface Message {
  step: number;
  source: number;
  target: number;
  chunks: string;
  numChunks: number;
  isReduced: boolean;
}

/** First and last of a run of numbers. */
export type Run = [number, number];

export function runsOf(text: string): Run[] {
  if (text === "") return [];
  return text.split(",").map((part) => {
    const [first, last] = part.split("-").map(Number);
    return [first ?? 0, last ?? first ?? 0];
  });
}

export function countOf(runs: Run[]): number {
  return runs.reduce((sum, [first, last]) => sum + last - first + 1, 0);
}

interface Content {
  steps: number[];
  sets: number[];
}

export class Film {
  readonly steps: Message[][];
  readonly sets: Run[][];
  /** What each rank holds of each chunk: from which number of steps on, which set. */
  private readonly contents: Content[];
  private readonly width: number;
  /** Of each rank and number of steps: contributions that it holds, and the chunks that have changed in the last step. */
  private readonly totals: number[][];
  private readonly changed: number[][][];

  constructor(readonly scene: SceneData) {
    this.width = scene.numChunks;
    this.sets = scene.sets.map(runsOf);
    this.steps = scene.steps.map(({ messages }, step) =>
      messages.map(([source, target, chunks, isReduced]) => ({
        step,
        source,
        target,
        chunks,
        numChunks: countOf(runsOf(chunks)),
        isReduced: isReduced === 1,
      })),
    );
    this.contents = Array.from({ length: scene.worldSize * this.width }, () => ({
      steps: [],
      sets: [],
    }));
    const counts = this.sets.map(countOf);
    this.totals = Array.from({ length: scene.worldSize }, () => []);
    this.changed = Array.from({ length: scene.worldSize }, () => []);
    [scene.start, ...scene.steps.map(({ changes }) => changes)].forEach((changes, after) => {
      for (let rank = 0; rank < scene.worldSize; rank++) {
        this.totals[rank]!.push(this.totals[rank]!.at(-1) ?? 0);
        this.changed[rank]!.push([]);
      }
      for (const [rank, chunk, set] of changes) {
        const content = this.contents[rank * this.width + chunk]!;
        const before = content.sets.at(-1);
        this.totals[rank]![after]! += counts[set]! - (before === undefined ? 0 : counts[before]!);
        this.changed[rank]![after]!.push(chunk);
        content.steps.push(after);
        content.sets.push(set);
      }
    });
  }

  get numSteps(): number {
    return this.steps.length;
  }

  /** The set of ranks whose contributions a rank has of a chunk after its first steps; -1 for none. */
  held(rank: number, chunk: number, after: number): number {
    const content = this.contents[rank * this.width + chunk];
    if (content === undefined) return -1;
    let index = content.steps.length;
    while (index > 0 && content.steps[index - 1]! > after) index--;
    return index === 0 ? -1 : content.sets[index - 1]!;
  }

  /** The chunks of a rank that may differ between two numbers of steps. */
  changes(rank: number, from: number, to: number): number[] {
    const [low, high] = from < to ? [from, to] : [to, from];
    return this.changed[rank]!.slice(low + 1, high + 1).flat();
  }

  /** The share of what a rank holds in all that it could hold. */
  share(rank: number, after: number): number {
    return Math.min(1, this.totals[rank]![after]! / (this.width * this.scene.complete));
  }
}
