/** Time over size by rounds * alpha + (traffic * beta + reduced * gamma) * n, with the crossing points. */
import { axisBottom, axisLeft } from "d3-axis";
import { scaleLog } from "d3-scale";
import { select, type Selection } from "d3-selection";
import { line } from "d3-shape";
import type { CurveData } from "./data";
import { colourOf } from "./network";
import type { Costs } from "./timing";
import { bytes, seconds } from "./words";

const [WIDE, HIGH, LEFT, TOP, RIGHT, BELOW] = [620, 360, 76, 16, 220, 40];
const SIZES = Array.from({ length: 65 }, (_, index) => 2 ** (8 + index / 3.2)); // 256 B to 256 MiB
const DASHES = ["none", "9 4", "3 4", "12 4 3 4", "6 2", "2 2", "14 6", "1 3"];

export interface Crossing {
  size: number;
  before: string;
  after: string;
}

export function secondsOf(curve: CurveData, costs: Costs, nbytes: number): number {
  const perByte = curve.traffic * costs.beta + curve.reduced * costs.gamma;
  return curve.rounds * costs.alpha + perByte * nbytes;
}

/** Where another curve becomes the lowest; all are straight lines, so the size is exact. */
export function crossings(curves: CurveData[], costs: Costs): Crossing[] {
  const found: Crossing[] = [];
  const fastest = (size: number): CurveData | undefined =>
    curves.toSorted((one, other) => secondsOf(one, costs, size) - secondsOf(other, costs, size))[0];
  let now = fastest(SIZES[0]!);
  for (const size of SIZES) {
    const next = fastest(size);
    if (now === undefined || next === undefined) break;
    if (next === now || secondsOf(next, costs, size) === secondsOf(now, costs, size)) continue;
    const slope = (curve: CurveData): number => curve.traffic * costs.beta + curve.reduced * costs.gamma;
    const gained = slope(now) - slope(next);
    if (gained > 0) {
      const at = ((next.rounds - now.rounds) * costs.alpha) / gained;
      found.push({ size: at, before: now.name, after: next.name });
    }
    now = next;
  }
  return found;
}

export class Curves {
  private readonly root: Selection<SVGSVGElement, unknown, null, undefined>;

  constructor(
    private readonly curves: CurveData[],
    parent: HTMLElement,
  ) {
    this.root = select(parent)
      .append("svg")
      .attr("viewBox", `0 0 ${WIDE} ${HIGH}`)
      .attr("role", "img");
    for (const name of ["below", "left", "lines", "leads", "size", "names", "marks"]) {
      this.root.append("g").attr("class", name);
    }
  }

  draw(costs: Costs): Crossing[] {
    const points = this.curves.map((curve) =>
      SIZES.map((size): [number, number] => [size, secondsOf(curve, costs, size)]),
    );
    const times = points.flat().map(([, time]) => time);
    const x = scaleLog([SIZES[0]!, SIZES.at(-1)!], [LEFT, WIDE - RIGHT]).base(2);
    const low = Math.max(1e-12, Math.min(...times));
    const y = scaleLog([low, Math.max(...times, 2 * low)], [HIGH - BELOW, TOP]);
    const sizes = [8, 12, 16, 20, 24, 28].map((power) => 2 ** power);
    // Marks at powers of ten, at most six of them.
    const [least, most] = y.domain().map((time) => Math.log10(time)) as [number, number];
    const every = Math.max(1, Math.ceil((most - least) / 6));
    const powers: number[] = [];
    for (let power = Math.ceil(least); power <= most; power += every) powers.push(10 ** power);
    this.root
      .select<SVGGElement>(".below")
      .attr("transform", `translate(0 ${HIGH - BELOW})`)
      .call(axisBottom(x).tickValues(sizes).tickFormat((size) => bytes(Number(size))));
    this.root
      .select<SVGGElement>(".left")
      .attr("transform", `translate(${LEFT} 0)`)
      .call(axisLeft(y).tickValues(powers).tickFormat((time) => seconds(Number(time))));
    const path = line<[number, number]>(
      ([size]) => x(size),
      ([, time]) => y(Math.max(low, time)),
    );
    this.root
      .select(".lines")
      .selectAll("path")
      .data(points)
      .join("path")
      .attr("class", "curve")
      .attr("stroke", (_, number) => colourOf(number))
      .attr("stroke-dasharray", (_, number) => DASHES[number % DASHES.length]!)
      .attr("d", (curve) => path(curve));
    // Names stand at the ends of their curves, one below the other.
    const ends = points
      .map((curve, number) => ({ number, height: y(Math.max(low, curve.at(-1)![1])) }))
      .sort((one, other) => one.height - other.height);
    ends.forEach((end, index) => {
      if (index > 0) end.height = Math.max(end.height, ends[index - 1]!.height + 19);
    });
    const beyond = Math.max(0, (ends.at(-1)?.height ?? 0) - (HIGH - BELOW));
    const start = WIDE - RIGHT;
    this.root
      .select(".leads")
      .selectAll("path")
      .data(ends)
      .join("path")
      .attr("class", "curve")
      .attr("stroke", ({ number }) => colourOf(number))
      .attr("d", ({ number, height }) => {
        const from = y(Math.max(low, points[number]!.at(-1)![1]));
        return `M${start} ${from} L${start + 24} ${height - beyond - 5}`;
      });
    this.root
      .select(".names")
      .selectAll("text")
      .data(ends)
      .join("text")
      .attr("x", start + 30)
      .attr("y", ({ height }) => height - beyond)
      .attr("class", "name")
      .text(({ number }) => this.curves[number]!.name);
    const found = crossings(this.curves, costs);
    const height = ({ size, after }: Crossing): number => {
      const curve = this.curves.find(({ name }) => name === after)!;
      return y(Math.max(low, secondsOf(curve, costs, size)));
    };
    const visible = found.filter(({ size }) => size >= SIZES[0]! && size <= SIZES.at(-1)!);
    const marks = this.root.select(".marks");
    marks
      .selectAll("circle")
      .data(visible)
      .join("circle")
      .attr("r", 6)
      .attr("class", "crossing")
      .attr("cx", ({ size }) => x(size))
      .attr("cy", height);
    marks
      .selectAll("text")
      .data(visible)
      .join("text")
      .attr("x", ({ size }) => x(size) + 10)
      .attr("y", (crossing) => height(crossing) + 18)
      .text(({ size }) => bytes(size));
    const at = x(Math.max(SIZES[0]!, Math.min(SIZES.at(-1)!, costs.nbytes)));
    this.root
      .select(".size")
      .selectAll("path")
      .data([at])
      .join("path")
      .attr("class", "now")
      .attr("d", (place) => `M${place} ${TOP} V${HIGH - BELOW}`);
    const said = found.map(({ size, before, after }) => `from ${bytes(size)} on ${after} is faster than ${before}`);
    this.root.attr("aria-label", `Time over size. ${said.join("; ") || "One algorithm is the fastest at every size"}.`);
    return found;
  }
}
